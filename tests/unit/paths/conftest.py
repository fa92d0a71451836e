"""Files and mounts that the tests of paths share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A mount with ``file``, ``sub/file``, and a secret outside of it."""
    root = tmp_path / "mount"
    (root / "sub").mkdir(parents=True)
    (root / "file").write_bytes(b"inside")
    (root / "sub" / "file").write_bytes(b"inside sub")
    (tmp_path / "secret").write_bytes(b"secret")
    return root


@pytest.fixture
def objects() -> Iterator[Any]:
    """fsspec's memory file system, empty before and after."""
    fs = pytest.importorskip("fsspec").filesystem("memory")
    _empty(fs)
    yield fs
    _empty(fs)


def _empty(fs: Any) -> None:
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
