"""Which file it is, rather than what it is called."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mmrpc.core.identity import identify
from mmrpc.core.location import FileIdentity
from mmrpc.core.system import libc


def identity(path: Path) -> FileIdentity:
    with open(path, "rb") as file:
        return identify(file.fileno())


def test_of_one_file(tmp_path: Path) -> None:
    """A file keeps its identity when it is written, renamed and linked."""
    (tmp_path / "a").write_bytes(b"1")
    before = identity(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"222")
    os.chmod(tmp_path / "a", 0o600)
    os.rename(tmp_path / "a", tmp_path / "b")
    os.link(tmp_path / "b", tmp_path / "c")
    assert identity(tmp_path / "b") == identity(tmp_path / "c") == before
    assert before.is_strong


@pytest.mark.parametrize("way", ["handle", "birth time"])
def test_reused_inode(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that gets the inode number of a deleted one has another identity."""
    if way == "birth time":
        monkeypatch.setattr(libc, "file_handle", lambda fd: None)
    seen = set()
    for _ in range(20):
        time.sleep(0.01 * (way == "birth time"))  # clocks of older kernels tick that coarsely
        (tmp_path / "x").touch()
        seen.add(identity(tmp_path / "x"))
        os.unlink(tmp_path / "x")
    assert len(seen) == 20
    assert all(found.is_strong for found in seen)


def test_weak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system has neither handles nor birth times, change time and size remain."""
    monkeypatch.setattr(libc, "file_handle", lambda fd: None)
    monkeypatch.setattr(libc, "birth_time_ns", lambda fd: None)
    (tmp_path / "x").write_bytes(b"1")
    before = identity(tmp_path / "x")
    assert not before.is_strong
    (tmp_path / "x").write_bytes(b"22")
    assert identity(tmp_path / "x") != before


def test_long_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long handle, as of a network file system, does not make references long."""
    monkeypatch.setattr(libc, "file_handle", lambda fd: b"x" * 128)
    (tmp_path / "x").touch()
    assert len(identity(tmp_path / "x").generation) == 17
