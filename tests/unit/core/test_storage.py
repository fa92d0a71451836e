"""Storages over mapped bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor
from mmrpc.core import storage
from mmrpc.core.layout import Layout
from mmrpc.core.storage import MappedStorage, byte_view, mapped_storage
from mmrpc.errors import LayoutError


@pytest.fixture
def x(tmp_path: Path) -> MemoryMappedTensor:
    return MemoryMappedTensor.from_tensor(torch.arange(6.0), filename=tmp_path / "x")


def test_class_survives_the_objects(x: MemoryMappedTensor) -> None:
    """The storage of any view is the mapped one, also when no Python object of it was kept."""
    view = x.view(2, 3).t()[1:].detach()
    mapping = x.untyped_storage()._mapping
    del x
    found = mapped_storage(view)
    assert type(found) is MappedStorage
    assert found._mapping is mapping


@pytest.mark.parametrize("count", [0, 6])
def test_storage_cannot_be_resized(count: int, tmp_path: Path) -> None:
    """Torch may not move the bytes to memory of its own, empty tensors included."""
    for x in (
        MemoryMappedTensor.zeros(count),
        MemoryMappedTensor.zeros(count, filename=tmp_path / "x"),
    ):
        with pytest.raises(RuntimeError, match="not resizable"):
            x.untyped_storage().resize_(999)
        with pytest.raises(RuntimeError, match="not resizable"):
            x.resize_(99)


def test_clone_is_plain(x: MemoryMappedTensor) -> None:
    """A copy of a mapped storage is in plain memory, and says so."""
    clone = x.untyped_storage().clone()
    assert type(clone) is torch.UntypedStorage
    assert clone.filename is None
    assert not clone.is_shared()
    assert clone.tolist() == x.untyped_storage().tolist()


def test_share_memory_is_nothing_to_do(x: MemoryMappedTensor) -> None:
    """A mapped storage is shared as it is."""
    mapped = x.untyped_storage()
    assert mapped.is_shared()
    assert mapped.share_memory_().data_ptr() == x.data_ptr()
    assert mapped.filename == x.filename


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2), torch.eye(2).to_sparse(), torch.ones(2, device="meta")],
    ids=["plain", "sparse", "meta"],
)
def test_others_are_not_mapped(tensor: torch.Tensor) -> None:
    """Tensors that are in no mapping of ours are told from those that are."""
    assert mapped_storage(tensor) is None


def test_tensors_without_storage(x: MemoryMappedTensor) -> None:
    """Inside a functorch transform there is no storage to ask."""
    seen = []

    def look(row: torch.Tensor) -> torch.Tensor:
        seen.append(mapped_storage(row))
        return row * 2

    torch.func.vmap(look)(x.detach())
    assert seen == [None]


def test_bytes_without_a_copy(x: MemoryMappedTensor) -> None:
    """The bytes of a contiguous tensor are those in memory."""
    view = byte_view(x)
    assert len(view) == 24
    x[0] = float("nan")
    assert bytes(view[:4]) == b"\0\0\xc0\x7f"
    assert len(byte_view(torch.empty(0))) == 0


def test_piece_of_a_mapping(x: MemoryMappedTensor) -> None:
    """A tensor can be put at any place of a mapping, and has a storage of just its size."""
    mapping = x.untyped_storage()._mapping
    piece = storage.tensor_of(mapping, Layout.contiguous(torch.float32, (2,), 8))
    assert piece.tolist() == [2, 3]
    assert piece.untyped_storage().nbytes() == 8
    assert piece._base is None


def test_alignment() -> None:
    """An address must suit the dtype."""
    storage.check_alignment(16, torch.complex128)
    with pytest.raises(LayoutError, match="not aligned"):
        storage.check_alignment(12, torch.float64)
