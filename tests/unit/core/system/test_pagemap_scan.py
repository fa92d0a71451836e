"""Pages of a private mapping that were written to are found, whichever way the kernel is asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor
from mmrpc.core.system import pagemap

PAGE = os.sysconf("SC_PAGE_SIZE")
PAGES = 2_000


@pytest.fixture(params=["scan", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's scan, and as on kernels that have none."""
    if request.param == "read":
        monkeypatch.setattr(pagemap, "_scan", lambda *_: None)
        monkeypatch.setattr(pagemap, "_CHUNK_PAGES", 300)  # so that it takes several
    return str(request.param)


@pytest.fixture
def private(tmp_path: Path) -> torch.Tensor:
    """A private mapping of a file with holes."""
    path = tmp_path / "x"
    path.touch()
    os.truncate(path, PAGES * PAGE)
    return MemoryMappedTensor.from_filename(path, torch.uint8, (PAGES * PAGE,), mode="r")


def found(tensor: torch.Tensor, first: int = 0, pages: int = PAGES) -> bool:
    return pagemap.has_private_pages(tensor.data_ptr() + first * PAGE, pages * PAGE)


def test_reading_makes_none(way: str, private: torch.Tensor) -> None:
    """Neither an untouched mapping nor one that was read has any."""
    assert not found(private)
    assert int(private.sum()) == 0
    assert not found(private)


@pytest.mark.parametrize("page", [0, 1, PAGES // 2, PAGES - 1])
def test_each_written_page_is_found(way: str, private: torch.Tensor, page: int) -> None:
    """One byte in one page is enough, and its neighbours are not accused."""
    private.sum()
    private[page * PAGE + 17] = 1
    assert found(private)
    assert found(private, page, 1)
    if page:
        assert not found(private, 0, page)
    if page < PAGES - 1:
        assert not found(private, page + 1, PAGES - page - 1)


def test_a_part_of_a_page_is_its_page(way: str, private: torch.Tensor) -> None:
    """A range need not start or end on a page's border."""
    private[5 * PAGE] = 1
    assert pagemap.has_private_pages(private.data_ptr() + 5 * PAGE + 100, 10)
    assert pagemap.has_private_pages(private.data_ptr() + 4 * PAGE + 100, PAGE)
    assert not pagemap.has_private_pages(private.data_ptr() + 4 * PAGE + 100, PAGE - 100)


def test_unknown_is_yes(monkeypatch: pytest.MonkeyPatch, private: torch.Tensor) -> None:
    """Where the kernel tells nothing, writes are assumed: they must never be missed."""
    monkeypatch.setattr("builtins.open", _no_proc)
    assert found(private)


def _no_proc(*_: object, **__: object) -> None:
    raise FileNotFoundError
