"""Which host, process and file it is, in terms that others can compare."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrpc.core import host, libc
from mmrpc.core.identity import identify
from mmrpc.core.location import FileIdentity
from tests.needs import needs
from tests.peers import Peer


def ids() -> tuple[str, str]:
    return host.host_id(), host.memory_host_id()


def test_processes_of_one_host_agree(peer: Peer) -> None:
    """Two processes in the same namespaces have the same ids."""
    assert peer.call(ids) == ids()
    assert [len(part) for part in ids()] == [16, 16]


@needs("namespaces")
@pytest.mark.parametrize(("option", "same"), [("--mount", [False, True]), ("--pid", [True, False])])
def test_namespaces_differ(option: str, same: list[bool]) -> None:
    """Another mount namespace is another host for files, another PID namespace one for memory."""
    code = "from mmrpc.core import host; print(host.host_id(), host.memory_host_id())"
    done = subprocess.run(
        ["unshare", option, "--fork", "--mount-proc", sys.executable, "-c", code]
        if option == "--pid"
        else ["unshare", option, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found = done.stdout.split()
    if option == "--pid":  # which takes a mount namespace of its own for /proc
        assert found[1] != ids()[1]
    else:
        assert [a == b for a, b in zip(found, ids(), strict=True)] == same


def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not tell, no other process is taken to be on this host."""

    def fail(*_: object) -> str:
        raise OSError

    before = ids()
    with monkeypatch.context() as patched:
        patched.setattr(os, "readlink", fail)
        host._forget()
        alone = ids()
    host._forget()
    assert ids() == before
    assert set(alone).isdisjoint(before)


def test_alive(peer: Peer) -> None:
    """A process is known by its start time, which another with its PID would not have."""
    mine = host.own_start_time()
    assert host.is_alive(os.getpid(), mine)
    assert not host.is_alive(os.getpid(), mine + 1)
    assert host.start_time(peer.pid) >= mine
    assert host.start_time(4194304) is None
    assert not host.is_alive(4194304, 0)


def start_in_child() -> tuple[int, int]:
    read, write = os.pipe()
    host.own_start_time()
    pid = os.fork()
    if not pid:
        os.write(write, str(host.own_start_time()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return int(os.read(read, 99)), host.own_start_time()


def test_forked_child_is_another_process(peer: Peer) -> None:
    """A child does not remember its parent's start time as its own."""
    child, parent = peer.call(start_in_child)
    assert child >= parent > 0


def test_command_with_parentheses(tmp_path: Path) -> None:
    """A process whose name looks like the end of one is read right."""
    script = tmp_path / "a) S 1 (b"
    script.symlink_to("/bin/sleep")
    with subprocess.Popen([script, "60"]) as process:
        try:
            assert host.start_time(process.pid) >= host.own_start_time()
        finally:
            process.kill()


class TestIdentity:
    """Which file it is, rather than what it is called."""

    def identity(self, path: Path) -> FileIdentity:
        with open(path, "rb") as file:
            return identify(file.fileno())

    def test_of_one_file(self, tmp_path: Path) -> None:
        """A file keeps its identity when it is written, renamed and linked."""
        (tmp_path / "a").write_bytes(b"1")
        before = self.identity(tmp_path / "a")
        (tmp_path / "a").write_bytes(b"222")
        os.chmod(tmp_path / "a", 0o600)
        os.rename(tmp_path / "a", tmp_path / "b")
        os.link(tmp_path / "b", tmp_path / "c")
        assert self.identity(tmp_path / "b") == self.identity(tmp_path / "c") == before
        assert before.is_strong

    @pytest.mark.parametrize("way", ["handle", "birth time"])
    def test_reused_inode(self, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file that gets the inode number of a deleted one has another identity."""
        if way == "birth time":
            monkeypatch.setattr(libc, "file_handle", lambda fd: None)
        seen = set()
        for _ in range(100):
            (tmp_path / "x").touch()
            seen.add(self.identity(tmp_path / "x"))
            os.unlink(tmp_path / "x")
        assert len(seen) == 100
        assert all(found.is_strong for found in seen)

    def test_weak(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where a file system has neither handles nor birth times, change time and size remain."""
        monkeypatch.setattr(libc, "file_handle", lambda fd: None)
        monkeypatch.setattr(libc, "birth_time_ns", lambda fd: None)
        (tmp_path / "x").write_bytes(b"1")
        before = self.identity(tmp_path / "x")
        assert not before.is_strong
        (tmp_path / "x").write_bytes(b"22")
        assert self.identity(tmp_path / "x") != before

    def test_long_handles(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A long handle, as of a network file system, does not make references long."""
        monkeypatch.setattr(libc, "file_handle", lambda fd: b"x" * 128)
        (tmp_path / "x").touch()
        assert len(self.identity(tmp_path / "x").generation) == 17


class TestLibc:
    """The calls that Python does not offer."""

    def test_mmap_error(self) -> None:
        """A descriptor that cannot be mapped is an OSError with its number."""
        read, write = os.pipe()
        with pytest.raises(OSError) as caught:  # noqa: PT011
            libc.mmap(read, 4096, shared=True)
        assert caught.value.errno in (errno.ENODEV, errno.EACCES)
        os.close(read)
        os.close(write)

    def test_rename_noreplace(self, tmp_path: Path) -> None:
        """A rename does not replace what is there."""
        (tmp_path / "a").write_bytes(b"a")
        (tmp_path / "b").write_bytes(b"b")
        with pytest.raises(FileExistsError):
            libc.rename_noreplace(str(tmp_path / "a"), str(tmp_path / "b"))
        libc.rename_noreplace(str(tmp_path / "a"), str(tmp_path / "c"))
        assert (tmp_path / "c").read_bytes() == b"a"

    def test_bad_descriptor(self) -> None:
        """What is asked of no file is not known, or an error."""
        assert libc.file_handle(-1) is None
        assert libc.birth_time_ns(-1) is None
        for call in (libc.filesystem_type, lambda fd: libc.fallocate(fd, 0, 1)):
            with pytest.raises(OSError, match="Bad file"):
                call(-1)

    def test_hole(self, tmp_path: Path) -> None:
        """A range that is given back reads as zeros and takes no space."""
        with open(tmp_path / "x", "wb+") as file:
            file.write(b"\1" * 65536)
            file.flush()
            libc.punch_hole(file.fileno(), 4096, 8192)
            assert os.pread(file.fileno(), 3, 4096) == b"\0\0\0"
            assert os.fstat(file.fileno()).st_size == 65536
