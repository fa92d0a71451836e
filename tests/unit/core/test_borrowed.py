"""Storages that torch mapped itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors
from tests.unit.core.tensors import bits

M = MemoryMappedTensor


@pytest.fixture
def path(tmp_path: Path) -> str:
    M.from_tensor(torch.arange(6.0), filename=tmp_path / "x")
    return str(tmp_path / "x")


def from_file(path: str, *, shared: bool = True) -> torch.UntypedStorage:
    return torch.UntypedStorage.from_file(path, shared=shared, nbytes=24)


def test_travels(path: str) -> None:
    """Its file is known, and a view of it travels by reference."""
    x = M.from_storage(from_file(path), dtype=torch.float32, shape=(2, 3))
    assert x.filename == path
    x[1].ref().open().fill_(7)
    assert x[1].tolist() == [7, 7, 7]
    assert M.from_filename(path, torch.float32, (6,))[3] == 7


def test_lives_as_long_as_its_views(path: str) -> None:
    """The other storage is kept alive, and unmapped with the last view."""
    row = M.from_storage(from_file(path), dtype=torch.float32, shape=(2, 3))[1]
    assert row.tolist() == [3, 4, 5]
    del row
    with open("/proc/self/maps") as maps:
        assert path not in maps.read()


def test_name_given(path: str) -> None:
    """A private map does not record its file; it can be told, and is checked."""
    private = from_file(path, shared=False)
    assert private.filename is None or private.filename == path
    x = M.from_storage(private, dtype=torch.float32, filename=path)
    assert x.filename == path
    assert bits(x.ref().open()) == bits(x)
    x[0] = 5
    with pytest.raises(errors.NotSharedError):
        x.ref()


def test_wrong_name(path: str, tmp_path: Path) -> None:
    """A name is believed only if the kernel says that the storage is mapped from it."""
    M.zeros(6, filename=tmp_path / "y")
    with pytest.raises(RuntimeError, match="not in"):
        M.from_storage(from_file(path), filename=tmp_path / "y")
    with pytest.raises(errors.LayoutError, match="not mapped from"):
        M.from_storage(torch.zeros(6).untyped_storage(), filename=tmp_path / "y")
    with pytest.raises(errors.PathNotFoundError):
        M.from_storage(torch.zeros(6).untyped_storage(), filename=tmp_path / "z")


def test_replaced_file(path: str) -> None:
    """A file that has another inode by now is not what is mapped."""
    storage = from_file(path)
    os.rename(path, path + ".old")
    M.zeros(6, filename=path)
    with pytest.raises(errors.LayoutError, match="not mapped from"):
        M.from_storage(storage, dtype=torch.float32)
