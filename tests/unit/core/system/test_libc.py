"""The calls that Python does not offer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mmrpc.core.system import libc


def test_mmap_error() -> None:
    """A descriptor that cannot be mapped is an OSError with its number."""
    read, write = os.pipe()
    with pytest.raises(OSError) as caught:
        libc.mmap(read, 4096, shared=True)
    assert caught.value.errno in (errno.ENODEV, errno.EACCES)
    os.close(read)
    os.close(write)


def test_rename_noreplace(tmp_path: Path) -> None:
    """A rename does not replace what is there."""
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    with pytest.raises(FileExistsError):
        libc.rename_noreplace(str(tmp_path / "a"), str(tmp_path / "b"))
    libc.rename_noreplace(str(tmp_path / "a"), str(tmp_path / "c"))
    assert (tmp_path / "c").read_bytes() == b"a"


def test_bad_descriptor() -> None:
    """What is asked of no file is not known, or an error."""
    assert libc.file_handle(-1) is None
    assert libc.birth_time_ns(-1) is None
    for call in (libc.filesystem_type, lambda fd: libc.fallocate(fd, 0, 1)):
        with pytest.raises(OSError, match="Bad file"):
            call(-1)


def test_hole(tmp_path: Path) -> None:
    """A range that is given back reads as zeros and takes no space."""
    with open(tmp_path / "x", "wb+") as file:
        file.write(b"\1" * 65536)
        file.flush()
        libc.punch_hole(file.fileno(), 4096, 8192)
        assert os.pread(file.fileno(), 3, 4096) == b"\0\0\0"
        assert os.fstat(file.fileno()).st_size == 65536
