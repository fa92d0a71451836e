"""What a type checker knows of the core: checked by mypy, never run."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch

import mmrpc
from mmrpc import MemoryMappedTensor, TensorRef


class Sub(MemoryMappedTensor):
    """A subclass keeps its own type."""


def constructors(path: Path, x: torch.Tensor, sizes: torch.Tensor) -> None:
    assert_type(MemoryMappedTensor.zeros(2, 3), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.zeros((2, 3), filename=path), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.ones([2, 3], filename=str(path)), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.empty(torch.Size([2]), dtype=torch.int8), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.empty(shape=(2, 3), existsok=True), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.zeros(sizes, device="cpu"), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.full(2, fill_value=True), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.full((2,), fill_value=1j, durable=True), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.zeros_like(x), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.full_like(x, 3, filename=path), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.from_tensor(x, filename=path), MemoryMappedTensor)
    assert_type(MemoryMappedTensor.from_tensor(x, shape=sizes), MemoryMappedTensor)
    assert_type(
        MemoryMappedTensor.from_filename(path, torch.float32, (2,), mode="r", offset=64),
        MemoryMappedTensor,
    )
    assert_type(MemoryMappedTensor.from_storage(x.untyped_storage()), MemoryMappedTensor)
    assert_type(MemoryMappedTensor(x, filename=path), MemoryMappedTensor)
    assert_type(Sub.ones(2), Sub)
    assert_type(Sub.from_tensor(x), Sub)


def wrong(path: Path, x: torch.Tensor) -> None:
    MemoryMappedTensor.zeros(2, file_name=path)  # type: ignore[call-overload]
    MemoryMappedTensor.zeros("2")  # type: ignore[arg-type]
    MemoryMappedTensor.zeros(2, 3, shape=(2, 3))  # type: ignore[call-overload]
    MemoryMappedTensor.full(2)  # type: ignore[call-overload]
    MemoryMappedTensor.zeros_like(x, dtype=torch.int8)  # type: ignore[call-arg]
    MemoryMappedTensor.from_filename(path, None, (2,))  # type: ignore[arg-type]
    MemoryMappedTensor.from_tensor([1, 2])  # type: ignore[arg-type]


def uses(x: MemoryMappedTensor, sub: Sub) -> None:
    assert_type(x.filename, str)
    assert_type(x[0], torch.Tensor)
    assert_type(x.unbind(0), tuple[MemoryMappedTensor, ...])
    assert_type(sub.split(2), tuple[Sub, ...])
    assert_type(sub.chunk(2, dim=1), tuple[Sub, ...])
    assert_type(x.requires_grad_(False), MemoryMappedTensor)
    assert_type(x.resize_(2, 3), MemoryMappedTensor)
    assert_type(x + 1, torch.Tensor)
    x.flush(async_=True)
    x.advise("random")
    x.check()


def references(x: MemoryMappedTensor) -> None:
    assert_type(x.ref(), TensorRef)
    assert_type(mmrpc.ref(x.view(-1)), TensorRef)
    assert_type(x.ref().open(), MemoryMappedTensor)
    assert_type(x.ref().open("r"), MemoryMappedTensor)
    assert_type(x.ref().open_plain(), torch.Tensor)
    assert_type(x.ref().to_json(), str)
    assert_type(TensorRef.from_json(b"{}"), TensorRef)
    x.ref().mode = "r"  # type: ignore[misc, assignment]
