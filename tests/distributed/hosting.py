"""Hosts for tests: processes in mount namespaces of their own, as other users if need be.

Run as a program, it is one of the hosts: it mounts what it should, becomes the user that it
should be, joins the group and says how that ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmrpc.testing import free_port

_REPOSITORY = Path(__file__).parents[2]
_RESULT = "RESULT "
# PIDs of its own too: else hosts could reach each other's anonymous memory.
_UNSHARE = ("unshare", "--mount", "--propagation", "private")
_UNSHARE += ("--pid", "--fork", "--kill-child", "--mount-proc")
DEADLINE_S = 100.0
NOBODY = 65534


@dataclass(frozen=True)
class Host:
    """A host with one worker of the same name.

    Attributes:
        mounts: Names of mounts, and where the config says that they are here.
        binds: What is seen at which path on this host only: source and target.
        read_only: Targets that are mounted read-only.
        hides: Directories that are empty on this host.
        user: User ID of the worker.
        settings: Further keys of the node in the config.
    """

    mounts: dict[str, str]
    binds: dict[str, str] = field(default_factory=dict)
    read_only: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    user: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def area() -> Iterator[Path]:
    """A directory that every user may enter."""
    path = Path(tempfile.mkdtemp(prefix="mmrpc-hosts-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def run(
    directory: Path,
    hosts: dict[str, Host],
    job: str,
    *args: Any,
    mounts: dict[str, Any],
    rpc: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Runs a job on the first of several hosts, while the others serve.

    Args:
        directory: For the config.
        hosts: Name of each host, and what it is like.
        job: ``module:function``; called with the arguments on the first host.
        *args: Arguments; they travel as JSON.
        mounts: The mounts of the config.
        rpc: The rpc section of the config.

    Returns:
        For each host, ``value`` or ``error`` with the class, text and attributes.
    """
    config = {
        "master": {"port": free_port()},
        "mounts": mounts,
        "nodes": {n: {"mounts": host.mounts, **host.settings} for n, host in hosts.items()},
        "rpc": {
            "timeout_s": 60,
            "handshake_timeout_s": 80,
            "mount_timeout_s": 40,
            **(rpc or {}),
        },
        "launch": {"via": "manual"},
    }
    (directory / "cluster.json").write_text(json.dumps(config))
    processes = {}
    outcomes: dict[str, dict[str, Any]] = {}
    try:
        for rank, (name, host) in enumerate(hosts.items()):
            task = {
                "name": name,
                "rank": rank,
                "world_size": len(hosts),
                "config": str(directory / "cluster.json"),
                "job": job,
                "args": args,
                "host": asdict(host),
            }
            processes[name] = subprocess.Popen(
                [*_UNSHARE, sys.executable, "-m", "tests.distributed.hosting", json.dumps(task)],
                cwd=_REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        for name, process in processes.items():
            output, errors = process.communicate(timeout=DEADLINE_S)
            found = [line for line in output.splitlines() if line.startswith(_RESULT)]
            assert found, f"{name} ended with {process.returncode}:\n{errors}"
            outcomes[name] = json.loads(found[-1].removeprefix(_RESULT))
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return outcomes


def value(outcomes: dict[str, dict[str, Any]]) -> Any:
    """What the job returned, if all went well."""
    for name, outcome in outcomes.items():
        assert "error" not in outcome, f"{name}: {outcome['error']['text']}"
    return next(iter(outcomes.values()))["value"]


def main() -> None:
    task = json.loads(sys.argv[1])
    host = Host(**task["host"])
    if os.geteuid() == 0 and not task.get("is_ready"):
        _become(task, host)
    sys.stdout.write(_RESULT + json.dumps(_work(task)) + "\n")


def _become(task: dict[str, Any], host: Host) -> None:
    """Mounts what this host has, and starts anew as its user."""
    for hidden in host.hides:
        _mount("-t", "tmpfs", "none", hidden)
    for source, target in host.binds.items():
        _mount("--bind", source, target)
        if target in host.read_only:
            _mount("-o", "remount,bind,ro", target)
    if host.user:
        _let_everyone_reach(os.path.realpath(sys.executable))
        task["is_ready"] = True
        identity = [f"--reuid={host.user}", f"--regid={host.user}", "--clear-groups"]
        command = [sys.executable, "-m", "tests.distributed.hosting", json.dumps(task)]
        os.environ["HOME"] = "/"
        os.execvp("setpriv", ["setpriv", *identity, *command])


def _let_everyone_reach(path: str) -> None:
    """On this host only, opens the closed directory above a file, with that file's branch in it."""
    parts = path.split("/")
    for count in range(2, len(parts)):
        directory = "/".join(parts[:count])
        if os.stat(directory).st_mode & 0o005 != 0o005:
            kept = tempfile.mkdtemp(prefix="mmrpc-kept-", dir="/dev/shm")
            branch = f"{directory}/{parts[count]}"
            _mount("--bind", branch, kept)
            _mount("-t", "tmpfs", "-o", "mode=755", "none", directory)
            os.mkdir(branch)
            _mount("--move", kept, branch)
            os.rmdir(kept)
            return


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=30)


def _work(task: dict[str, Any]) -> dict[str, Any]:
    from mmrpc import rpc
    from mmrpc.errors import MmrpcError

    try:
        rpc.init_rpc(
            task["name"],
            rank=task["rank"],
            world_size=task["world_size"],
            cluster=task["config"],
            node=task["name"],
        )
    except MmrpcError as error:
        return {"error": describe(error)}
    result: dict[str, Any] = {"value": None}
    try:
        if task["rank"] == 0:
            module, _, function = task["job"].partition(":")
            result = {"value": getattr(importlib.import_module(module), function)(*task["args"])}
    except MmrpcError as error:
        result = {"error": describe(error)}
    rpc.shutdown()
    return result


def describe(error: Exception) -> dict[str, Any]:
    """An error as JSON has it."""
    fields = getattr(error, "fields", ())
    return {
        "type": type(error).__name__,
        "text": str(error),
        **{name: getattr(error, name) for name in fields},
    }


if __name__ == "__main__":
    signal.alarm(int(DEADLINE_S))  # nobody waits for a host whose test has ended
    main()
