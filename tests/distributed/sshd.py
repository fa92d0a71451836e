"""A real sshd on a loopback port, with keys and a client config of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.needs import program

_START_S = 30.0


@dataclass(frozen=True)
class Sshd:
    """A running server.

    Attributes:
        port: On 127.0.0.1.
        config_file: For ``ssh -F``.
        process: The server.
    """

    port: int
    config_file: Path
    process: subprocess.Popen[bytes]

    def node(self, **more: object) -> dict[str, object]:
        """A node of a cluster config that is reached by this server."""
        return {"ssh": {"port": self.port, "config_file": str(self.config_file)}, **more}


@contextlib.contextmanager
def serving(
    directory: Path, prefix: tuple[str, ...] = (), address: str = "127.0.0.1"
) -> Iterator[Sshd]:
    """Starts an sshd and stops it.

    Args:
        directory: For its files.
        prefix: What runs it, such as ``ip netns exec NAME``.
        address: Where it listens.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where it separates privileges
    for key in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key)]
        subprocess.run(command, check=True, timeout=30)
    port = _free_port()
    public = (directory / "host.pub").read_text()
    (directory / "known_hosts").write_text(f"[{address}]:{port} {public}")
    (directory / "sshd_config").write_text(
        f"ListenAddress {address}\nPort {port}\nHostKey {directory / 'host'}\n"
        f"AuthorizedKeysFile {directory / 'user.pub'}\nPidFile {directory / 'pid'}\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
        "Subsystem sftp internal-sftp\n"
        f"SetEnv MMRPC_TEST_RUN={os.environ['MMRPC_TEST_RUN']}\n"
    )
    config_file = directory / "ssh_config"
    config_file.write_text(
        f"Host *\n  User {getpass.getuser()}\n  IdentityFile {directory / 'user'}\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {directory / 'known_hosts'}\n"
    )
    sshd = program("sshd")
    assert sshd is not None
    log = (directory / "log").open("wb")
    process = subprocess.Popen(
        [*prefix, sshd, "-D", "-e", "-f", str(directory / "sshd_config")], stderr=log
    )
    try:
        _wait_for_listener(directory / "log", process)
        yield Sshd(port, config_file, process)
    finally:
        process.terminate()
        process.wait()
        log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_listener(log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while "Server listening" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
