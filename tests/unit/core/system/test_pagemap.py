"""Which pages of a private mapping are in no file."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor
from mmrpc.core.system import pagemap

PAGE = 4096


@pytest.fixture
def x(tmp_path: Path) -> MemoryMappedTensor:
    """Eight pages that are mapped copy-on-write."""
    (tmp_path / "x").write_bytes(b"\1" * 8 * PAGE)
    return MemoryMappedTensor.from_filename(tmp_path / "x", torch.uint8, (8 * PAGE,), mode="r")


def private_pages(x: MemoryMappedTensor) -> list[int]:
    return [n for n in range(8) if pagemap.has_private_pages(x.data_ptr() + n * PAGE, PAGE)]


def test_pages_that_were_written(x: MemoryMappedTensor) -> None:
    """A page is private from the first write to it, and no page becomes so by being read."""
    assert private_pages(x) == []
    assert x.sum() == 8 * PAGE
    assert private_pages(x) == []
    x[3 * PAGE + 5] = 1
    assert private_pages(x) == [3]
    x[7 * PAGE :] = 1
    assert private_pages(x) == [3, 7]


def test_ranges(x: MemoryMappedTensor) -> None:
    """A range counts as private if any page that it touches is."""
    x[3 * PAGE] = 1
    start = x.data_ptr()
    assert pagemap.has_private_pages(start, 8 * PAGE)
    assert not pagemap.has_private_pages(start, 3 * PAGE)
    assert pagemap.has_private_pages(start, 3 * PAGE + 1)
    assert not pagemap.has_private_pages(start + 4 * PAGE, 4 * PAGE)


def test_many_pages(x: MemoryMappedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that is read in several pieces is looked at to its end."""
    monkeypatch.setattr(pagemap, "_CHUNK_PAGES", 3)
    assert not pagemap.has_private_pages(x.data_ptr(), 8 * PAGE)
    x[-1] = 1
    assert pagemap.has_private_pages(x.data_ptr(), 8 * PAGE)


def test_without_proc(x: MemoryMappedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not tell, a write must not be missed."""

    def fail(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(builtins, "open", fail)
    assert pagemap.has_private_pages(x.data_ptr(), PAGE)
