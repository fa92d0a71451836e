"""What tests of the core do with tensors: make them, compare them bit by bit, write to them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from mmrpc import MemoryMappedTensor, TensorRef
from mmrpc.core.layout import DTYPES

_names = itertools.count()
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

ORDINARY = [dtype for dtype in DTYPES.values() if not str(dtype).startswith("torch.bits")]


def bits(tensor: torch.Tensor) -> list[Any]:
    """The values as integers of their size, so that NaN and -0.0 compare as what they are."""
    if tensor.is_nested:
        return [bits(part) for part in tensor.unbind(0)]
    plain = tensor.detach().as_subclass(torch.Tensor)
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.resolve_neg().view(_INTEGERS[plain.itemsize]).tolist()


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous plain tensor of random bytes."""
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,))
    flat = raw.to(torch.uint8).view(dtype) if count else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def new_name(directory: Path | str) -> str:
    """A file name that no other test has."""
    return f"{directory}/x{next(_names)}.bin"


def in_file(source: torch.Tensor, directory: Path) -> MemoryMappedTensor:
    """A copy in a file."""
    return MemoryMappedTensor.from_tensor(source, filename=new_name(directory))


def in_memory(source: torch.Tensor, directory: Path) -> MemoryMappedTensor:
    """A copy in anonymous memory."""
    return MemoryMappedTensor.from_tensor(source)


def in_private_map(source: torch.Tensor, directory: Path) -> MemoryMappedTensor:
    """A copy in a file that is mapped copy-on-write."""
    file = in_file(source, directory)
    shape = file._nested_tensor_size() if file.is_nested else file.shape
    return MemoryMappedTensor.from_filename(file.filename, file.dtype, shape, mode="r")


def behind_an_offset(source: torch.Tensor, directory: Path) -> MemoryMappedTensor:
    """A copy in a file that holds something else before and after it."""
    name = new_name(directory)
    data = source.reshape(-1).view(torch.uint8).tolist() if source.numel() else []
    Path(name).write_bytes(b"\xaa" * 48 + bytes(data) + b"\xaa" * 5)
    return MemoryMappedTensor.from_filename(name, source.dtype, source.shape, offset=48)


PLACES: dict[str, Callable[[torch.Tensor, Path], MemoryMappedTensor]] = {
    "file": in_file,
    "memory": in_memory,
    "private": in_private_map,
    "offset": behind_an_offset,
}

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """An index of which torch makes a view: integers, slices, None, an ellipsis."""
    parts: list[Any] = []
    ends = st.none() | st.integers(-7, 7)
    for size in shape[: draw(st.integers(0, len(shape)))]:
        part: st.SearchStrategy[Any] = st.builds(slice, ends, ends, st.none() | st.integers(1, 3))
        if size:
            part |= st.integers(-size, size - 1)
        parts.append(draw(part))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), None)
    if draw(st.booleans()):
        parts.append(Ellipsis)
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)


@st.composite
def steps(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, tuple[Any, ...]]:
    """A method of a tensor that gives a view, and its arguments."""
    names = ["__getitem__", "unsqueeze", "detach", "expand"]
    if shape:
        names += ["transpose", "narrow"]
    name = draw(st.sampled_from(names))
    if name == "__getitem__":
        return name, (draw(indices(shape)),)
    if name == "unsqueeze":
        return name, (draw(st.integers(0, len(shape))),)
    if name == "expand":
        return name, (draw(st.integers(1, 3)), *shape)
    dims = st.integers(0, len(shape) - 1) if shape else st.nothing()
    if name == "transpose":
        return name, (draw(dims), draw(dims))
    if name == "narrow":
        dim = draw(dims)
        start = draw(st.integers(0, shape[dim]))
        return name, (dim, start, draw(st.integers(0, shape[dim] - start)))
    return name, ()


# What a peer is asked to do.


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Class, values, sizes, strides and dtype of a tensor that was received."""
    if tensor.is_nested:
        sizes, strides = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
        layout: tuple[Any, ...] = (sizes.tolist(), strides.tolist())
    else:
        layout = (tuple(tensor.shape), tensor.stride())
    return type(tensor).__name__, bits(tensor), *layout, str(tensor.dtype)


def open_and_describe(reference: TensorRef) -> tuple[Any, ...]:
    """`describe` for what a reference leads to."""
    return describe(reference.open())


def flip(tensor: torch.Tensor) -> None:
    """Changes each element in place, and changes it back the next time."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.dtype is torch.bool:
        plain.logical_not_()
    else:
        plain.view(_INTEGERS[plain.itemsize]).bitwise_not_()


def open_and_flip(reference: TensorRef) -> None:
    """`flip` for what a reference leads to."""
    flip(reference.open())


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Waits for what another process or thread is about to do."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
