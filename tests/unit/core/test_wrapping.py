"""Existing storages, and tensors that are given the class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors

M = MemoryMappedTensor


@pytest.fixture
def path(tmp_path: Path) -> str:
    M.from_tensor(torch.arange(6.0), filename=tmp_path / "x")
    return str(tmp_path / "x")


class TestStorage:
    """from_storage."""

    def test_writes_reach_the_storage(self) -> None:
        """Nothing is copied."""
        source = torch.arange(6.0)
        x = M.from_storage(source.untyped_storage(), dtype=torch.float32, shape=(2, 3))
        x[0, 1] = 9
        assert source[1] == 9
        with pytest.raises(errors.NotSharedError):
            x.ref()

    def test_dtype(self) -> None:
        """Untyped storages are int64 unless said; typed ones must have the default dtype."""
        assert M.from_storage(torch.arange(3).untyped_storage()).tolist() == [0, 1, 2]
        typed = torch.arange(3.0)._typed_storage()
        assert M.from_storage(typed).tolist() == [0, 1, 2]
        other = torch.arange(3)._typed_storage()
        with pytest.raises(RuntimeError, match="dtype="):
            M.from_storage(other)
        assert M.from_storage(other, dtype=torch.int64).tolist() == [0, 1, 2]
        with pytest.raises(errors.LayoutError, match="whole number"):
            M.from_storage(torch.arange(3, dtype=torch.int32).untyped_storage())

    def test_index(self) -> None:
        """An index is applied to the whole."""
        storage = torch.arange(6).untyped_storage()
        assert M.from_storage(storage, shape=(2, 3), index=(1, slice(2))).tolist() == [3, 4]

    def test_mistakes(self) -> None:
        """What does not fit, or is no storage, is refused."""
        storage = torch.arange(6).untyped_storage()
        with pytest.raises(errors.LayoutError, match="needs 56 bytes and the storage has 48"):
            M.from_storage(storage, shape=(7,))
        with pytest.raises(TypeError, match="a storage is needed"):
            M.from_storage([1, 2])
        with pytest.raises(RuntimeError, match="on meta"):
            M.from_storage(torch.empty(3, device="meta").untyped_storage())
        with pytest.raises(errors.LayoutError):
            M.from_storage(storage, device="cuda")

    def test_own_storage(self, path: str) -> None:
        """A mapped storage of ours stays mapped."""
        x = M.from_filename(path, torch.float32, (6,))
        y = M.from_storage(x.untyped_storage(), dtype=torch.float32, shape=(2, 3), filename=path)
        assert y.filename == path
        assert y.ref().open().tolist() == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(RuntimeError, match="not in"):
            M.from_storage(x.untyped_storage(), filename=path + "2")
        with pytest.raises(RuntimeError, match="anonymous"):
            M.from_storage(M.zeros(2).untyped_storage(), filename=path)


def test_wrapping_keeps_the_source_as_it_is() -> None:
    """Giving a tensor the class makes another tensor; the source stays plain."""
    source = torch.ones(3)
    wrapped = M(source)
    assert (type(source), type(wrapped)) == (torch.Tensor, M)
    with pytest.raises(RuntimeError, match="detach"):
        M(torch.ones(2, requires_grad=True))
