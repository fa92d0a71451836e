"""What a newcomer tries first: each public constructor and property, as the API describes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor


@pytest.fixture
def name(tmp_path: Path) -> str:
    return str(tmp_path / "x.memmap")


def test_write_and_map_again(name: str) -> None:
    """What is assigned to a tensor in a file is what the next one who maps the file sees."""
    x = MemoryMappedTensor.from_tensor(torch.arange(4.0), filename=name)
    x[0] = 10.0
    again = MemoryMappedTensor.from_filename(name, dtype=torch.float32, shape=(4,))
    assert repr(again) == "MemoryMappedTensor([10.,  1.,  2.,  3.])"


def test_without_a_file() -> None:
    """Without a filename the data is in shared memory; indexing keeps the class, math does not."""
    z = MemoryMappedTensor.zeros(2, 3)
    assert (z.shape, z.dtype) == (torch.Size([2, 3]), torch.float32)
    assert (type(z[0]).__name__, type(z + 1).__name__) == ("MemoryMappedTensor", "Tensor")
    with pytest.raises(RuntimeError, match="no file"):
        z.filename  # noqa: B018


def test_empty_in_a_file(name: str) -> None:
    """A new tensor's file is as large as its elements."""
    x = MemoryMappedTensor.empty((2, 3), dtype=torch.int64, filename=name)
    assert x.shape == torch.Size([2, 3])
    assert Path(name).stat().st_size == 48


def test_like() -> None:
    """The *_like constructors take shape and dtype of their input."""
    source = torch.zeros(2, 3, dtype=torch.int64)
    x = MemoryMappedTensor.empty_like(source)
    assert (x.shape, x.dtype) == (source.shape, torch.int64)
    assert repr(MemoryMappedTensor.zeros_like(torch.ones(3))) == "MemoryMappedTensor([0., 0., 0.])"
    assert repr(MemoryMappedTensor.ones_like(torch.zeros(3))) == "MemoryMappedTensor([1., 1., 1.])"
    full = MemoryMappedTensor.full_like(torch.zeros(3, dtype=torch.int64), 7)
    assert repr(full) == "MemoryMappedTensor([7, 7, 7])"


def test_values() -> None:
    """Zeros, ones and full hold what they are called."""
    assert repr(MemoryMappedTensor.zeros(2, 3)) == repr_of([[0.0] * 3] * 2)
    assert repr(MemoryMappedTensor.ones(2, 3)) == repr_of([[1.0] * 3] * 2)
    full = MemoryMappedTensor.full(3, fill_value=2, dtype=torch.int64)
    assert repr(full) == "MemoryMappedTensor([2, 2, 2])"


def repr_of(values: list[list[float]]) -> str:
    rows = [f"[{', '.join(f'{value:.0f}.' for value in row)}]" for row in values]
    return f"MemoryMappedTensor([{(',' + chr(10) + ' ' * 20).join(rows)}])"


def test_private_map(name: str) -> None:
    """With mode "r" what is written stays in this process, and the file is as it was."""
    MemoryMappedTensor.from_tensor(torch.arange(6), filename=name)
    x = MemoryMappedTensor.from_filename(name, torch.int64, (2, 3), mode="r")
    x[0, 0] = 100
    again = MemoryMappedTensor.from_filename(name, torch.int64, (2, 3))
    assert again.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert x[0, 0] == 100


def test_storage_of_another(name: str) -> None:
    """A storage that torch mapped from a file gives a tensor that knows the file."""
    MemoryMappedTensor.from_tensor(torch.arange(6.0), filename=name)
    storage = torch.UntypedStorage.from_file(name, shared=True, nbytes=24)
    x = MemoryMappedTensor.from_storage(storage, dtype=torch.float32, shape=(2, 3))
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert x.filename == name


def test_copy_of_itself_is_itself(name: str) -> None:
    """A tensor that is in the file already is not copied."""
    x = MemoryMappedTensor.from_tensor(torch.arange(3.0), filename=name)
    assert repr(x) == "MemoryMappedTensor([0., 1., 2.])"
    assert MemoryMappedTensor.from_tensor(x, filename=name) is x
