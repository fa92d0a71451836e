"""A real sshd as a mount: by fsspec's SFTP, and by sshfs as a network file system."""

from __future__ import annotations

import contextlib
import gc
import getpass
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrpc.conformance import MountConformance
from mmrpc.core.location import FileIdentity, Mode, MountLocation
from mmrpc.paths.access import Policy
from mmrpc.paths.fstype import file_system_of
from mmrpc.paths.mounts import Mount, MountTable
from mmrpc.paths.proof import Proof
from mmrpc.paths.resolver import ClusterResolver
from tests.distributed.sshd import Sshd, serving
from tests.needs import needs


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A server that this user may log in to."""
    with serving(tmp_path_factory.mktemp("sshd")) as server:
        yield server


class _Files:
    """Files behind the server, reached without it."""

    directory: Path

    def put(self, relative: str, content: bytes) -> None:
        path = self.directory / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_bytes(content)
        os.rename(new, path)

    def delete(self, relative: str) -> None:
        (self.directory / relative).unlink()


@needs("sshd")
class TestSftp(_Files, MountConformance):
    """Files of an SFTP server, whose times are whole seconds."""

    tells_versions = False

    @pytest.fixture(autouse=True)
    def _server(self, sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        fsspec = pytest.importorskip("fsspec")
        sshfs = pytest.importorskip("sshfs")
        self.port = sshd.port
        # A node's own settings: they stand in fsspec's config, never in the URL.
        keys = {"client_keys": [str(sshd.config_file.with_name("user"))], "config": []}
        monkeypatch.setitem(fsspec.config.conf, "sftp", keys)
        monkeypatch.setenv("FSSPEC_SFTP", json.dumps(keys))
        sshfs.SSHFileSystem.clear_instance_cache()
        yield
        # A connection lasts as long as its client.
        sshfs.SSHFileSystem.clear_instance_cache()
        gc.collect()

    def make_mount(self, tmp_path: Path) -> Mount:
        self.directory = tmp_path / "served"
        self.directory.mkdir()
        url = f"sftp://{getpass.getuser()}@127.0.0.1:{self.port}{self.directory}"
        return Mount("data", url, "write")


@contextlib.contextmanager
def fuse(sshd: Sshd, served: Path, at: Path, *options: str) -> Iterator[None]:
    """Mounts a directory of the server as a file system."""
    command = ["sshfs", "-F", str(sshd.config_file), "-p", str(sshd.port)]
    for option in options:
        command += ["-o", option]
    user = getpass.getuser()
    subprocess.run([*command, f"{user}@127.0.0.1:{served}", str(at)], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(at)], check=True, timeout=60)


@needs("sshfs")
class TestSshfs(_Files, MountConformance):
    """The same server as a FUSE file system, where inode numbers mean nothing elsewhere."""

    tells_versions = False
    proof = Proof("data", "nonce")

    @pytest.fixture(autouse=True)
    def _mounted(self, sshd: Sshd, tmp_path: Path) -> Iterator[None]:
        self.directory, self.mounted = tmp_path / "served", tmp_path / "mounted"
        self.directory.mkdir()
        self.mounted.mkdir()
        with fuse(sshd, self.directory, self.mounted, "dir_cache=no"):
            yield

    def make_mount(self, tmp_path: Path) -> Mount:
        assert file_system_of(str(self.mounted)).kind == "fuse.sshfs"
        return Mount("data", str(self.mounted), "write")


@needs("sshfs")
def test_a_file_that_the_network_shows_late(sshd: Sshd, tmp_path: Path) -> None:
    """A name whose absence is remembered for a while is found before the deadline."""
    served, mounted = tmp_path / "served", tmp_path / "mounted"
    served.mkdir()
    mounted.mkdir()
    with fuse(sshd, served, mounted, "dcache_timeout=2", "entry_timeout=2", "negative_timeout=2"):
        assert os.listdir(mounted) == []
        assert not (mounted / "x").exists()
        (served / "x").write_bytes(b"12345678")
        assert not (mounted / "x").exists()
        resolver = ClusterResolver(
            MountTable([Mount("data", str(mounted))], node="b"),
            proven={"data": Proof("data", "nonce")},
            policy=Policy(visibility_timeout_s=60),
        )
        identity = FileIdentity(1, 1, b"h")
        location = MountLocation("data", "x", "0123456789abcdef", identity, 8)
        assert resolver.attach(location, Mode.READ, 8).nbytes == 8
