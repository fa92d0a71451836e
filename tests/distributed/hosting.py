"""Hosts for tests: processes in mount namespaces of their own, as other users if need be.

Each mounts what it should, becomes the user that it should be, joins the group and says how that
ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrpc.testing import free_port
from tests.forked import Forked, end_with_parent, mount
from tests.peers import become


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
        *args: Arguments.
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
    with contextlib.ExitStack() as stack:
        processes = {}
        for rank, (name, host) in enumerate(hosts.items()):
            task = _Task(name, rank, len(hosts), str(directory / "cluster.json"), job, args)
            # PIDs of its own too: else hosts could reach each other's anonymous memory.
            process = Forked(_be, host, task, mounts=True, pids=True)
            processes[name] = stack.enter_context(process)
        return {name: json.loads(process.result()) for name, process in processes.items()}


@dataclass(frozen=True)
class _Task:
    name: str
    rank: int
    world_size: int
    config: str
    job: str
    args: tuple[Any, ...]


def value(outcomes: dict[str, dict[str, Any]]) -> Any:
    """What the job returned, if all went well."""
    for name, outcome in outcomes.items():
        assert "error" not in outcome, f"{name}: {outcome['error']['text']}"
    return next(iter(outcomes.values()))["value"]


def _be(host: Host, task: _Task) -> str:
    """What a host comes to, as JSON."""
    for hidden in host.hides:
        mount("-t", "tmpfs", "none", hidden)
    for source, target in host.binds.items():
        mount("--bind", source, target)
        if target in host.read_only:
            mount("-o", "remount,bind,ro", target)
    if host.user:
        _let_everyone_reach(os.path.realpath(sys.executable))
        os.environ["HOME"] = "/"
        become(host.user)
        end_with_parent()
    return json.dumps(_work(task))


def _let_everyone_reach(path: str) -> None:
    """On this host only, opens the closed directory above a file, with that file's branch in it."""
    parts = path.split("/")
    for count in range(2, len(parts)):
        directory = "/".join(parts[:count])
        if os.stat(directory).st_mode & 0o005 != 0o005:
            kept = tempfile.mkdtemp(prefix="mmrpc-kept-", dir="/dev/shm")
            branch = f"{directory}/{parts[count]}"
            mount("--bind", branch, kept)
            mount("-t", "tmpfs", "-o", "mode=755", "none", directory)
            os.mkdir(branch)
            mount("--move", kept, branch)
            os.rmdir(kept)
            return


def _work(task: _Task) -> dict[str, Any]:
    from mmrpc import rpc
    from mmrpc.errors import MmrpcError

    try:
        rpc.init_rpc(
            task.name,
            rank=task.rank,
            world_size=task.world_size,
            cluster=task.config,
            node=task.name,
        )
    except MmrpcError as error:
        return {"error": describe(error)}
    result: dict[str, Any] = {"value": None}
    try:
        if task.rank == 0:
            module, _, function = task.job.partition(":")
            result = {"value": getattr(importlib.import_module(module), function)(*task.args)}
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
