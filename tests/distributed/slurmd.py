"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, by themselves."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.needs import program

_START_S = 90.0
NODES = ("s1", "s2")


@dataclass(frozen=True)
class Slurm:
    """A running Slurm.

    Attributes:
        env: What its commands need in their environment.
        directory: Its files.
    """

    env: dict[str, str]
    directory: Path

    def command(self, *words: str) -> str:
        """Runs one of Slurm's commands and gives its output."""
        done = subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Slurm]:
    """Starts all of it and stops it."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    host = socket.gethostname().split(".")[0]
    socket_path = directory / "munge.socket"
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    ports = _free_ports(1 + len(NODES))
    conf = directory / "slurm.conf"
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        *("SlurmUser=root", "SlurmdUser=root"),
        f"AuthType=auth/munge\nAuthInfo=socket={socket_path}\nCryptoType=crypto/munge",
        f"CredType=cred/munge\nStateSaveLocation={directory / 'state'}",
        f"SlurmctldPidFile={directory / 'slurmctld.pid'}",
        f"SlurmdPidFile={directory}/%n.pid\nSlurmdSpoolDir={directory}/%n",
        *("ProctrackType=proctrack/linuxproc", "TaskPlugin=task/affinity", "MpiDefault=none"),
        *("SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU", "ReturnToService=2"),
        *("SlurmdParameters=config_overrides", "KillWait=5", "PlugStackConfig=/dev/null"),
        *("JobAcctGatherType=jobacct_gather/none", "AccountingStorageType=accounting_storage/none"),
        *(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8"
            for name, port in zip(NODES, ports[1:], strict=True)
        ),
        f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP",
    ]
    conf.write_text("\n".join(lines) + "\n")
    for name in ("state", *NODES):
        (directory / name).mkdir()
    slurm = Slurm({"SLURM_CONF": str(conf)}, directory)
    munge = [
        *(_path("munged"), "--foreground", "--force", f"--key-file={key}"),
        f"--socket={socket_path}",
        *(f"--{name}-file={directory / f'munge.{name}'}" for name in ("pid", "seed", "log")),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_daemon(munge, directory / "munged.out"))
        _wait(socket_path.exists, "munged")
        control = [_path("slurmctld"), "-D", "-f", str(conf)]
        stack.enter_context(_daemon(control, directory / "slurmctld.out", slurm.env))
        for name in NODES:
            node = [_path("slurmd"), "-D", "-N", name, "-f", str(conf)]
            stack.enter_context(_daemon(node, directory / f"{name}.out", slurm.env))
        _wait(lambda: _idle(slurm) == len(NODES), "slurm", directory)
        yield slurm


def _idle(slurm: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"],
        env={**os.environ, **slurm.env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return len(done.stdout.split())


def _path(name: str) -> str:
    found = program(name)
    assert found is not None
    return found


@contextlib.contextmanager
def _daemon(command: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(holds: object, what: str, directory: Path | None = None) -> None:
    assert callable(holds)
    deadline = time.monotonic() + _START_S
    while not holds():
        if time.monotonic() > deadline:
            logs = "\n".join(p.read_text() for p in directory.glob("*.out")) if directory else ""
            raise AssertionError(f"{what} did not start\n{logs[-4000:]}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
