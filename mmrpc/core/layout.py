"""Where a tensor's elements lie in a run of bytes: dtype, shape, strides, offset. Arithmetic only.

Nothing here touches a file or a storage. All sizes that come from outside (a reference, a
user's shape) pass through `Layout.check` or `parse_size` before anybody computes with them.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAX_BYTES = 2**63 - 1  # torch counts in int64
_MAX_DIMS = 64
_ONLY_INT = {int}  # no bool, which is one too
KEPT_LAYOUTS = 4096

# Quantized dtypes carry parameters that raw bytes do not.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qu", "torch.qi"))
}
"""Every dtype that raw bytes can hold, by its name."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``float32``.

    Raises:
        LayoutError: If raw bytes cannot hold it.
        TypeError: If it is no dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
    try:
        return _NAMES[dtype]
    except KeyError:
        raise LayoutError(
            f"a tensor of {dtype} cannot be mapped: its values need parameters that raw bytes "
            "do not hold",
            hint="Dequantize it first.",
        ) from None


def alignment_bytes(dtype: torch.dtype) -> int:
    """Bytes that an element's address must be a multiple of."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def numel(shape: Iterable[int]) -> int:
    """Number of elements of a shape."""
    return functools.reduce(operator.mul, shape, 1)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def span_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to behind the last one that a strided tensor touches."""
    if 0 in shape:
        return 0
    return 1 + int(sum(map(operator.mul, shape, strides))) - sum(strides)


@dataclass(frozen=True)
class Layout:
    """A strided tensor in a run of bytes.

    Programs use the same few again and again: those are kept, and what was computed of them.

    Attributes:
        dtype: Type of the elements.
        shape: Sizes.
        strides: Distances in elements; not negative.
        offset_bytes: From the start of the file or memory to the first element.
        conj: Whether the values are the conjugates of the bytes.
        neg: Whether the values are the negatives of the bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int = 0
    conj: bool = False
    neg: bool = False

    @classmethod
    @functools.lru_cache(maxsize=KEPT_LAYOUTS)
    def contiguous(
        cls, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0
    ) -> Layout:
        """The layout of a contiguous tensor, checked."""
        return cls(dtype, shape, contiguous_strides(shape), offset_bytes).check()

    @classmethod
    def of(cls, tensor: torch.Tensor, start_bytes: int) -> Layout:
        """The layout of an existing strided tensor whose storage starts at `start_bytes`."""
        dtype = tensor.dtype
        return _known(
            dtype,
            tuple(tensor.shape),
            tensor.stride(),
            start_bytes + int(tensor.storage_offset()) * dtype.itemsize,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @functools.cached_property
    def packed(self) -> tuple[Any, ...]:
        """It as plain values, for a reference."""
        strides = None if self.is_contiguous else self.strides
        form = (dtype_name(self.dtype), self.offset_bytes, self.shape, strides)
        return (*form, self.conj, self.neg) if self.conj or self.neg else form

    @classmethod
    @functools.lru_cache(maxsize=KEPT_LAYOUTS)
    def unpack(cls, packed: tuple[Any, ...]) -> Layout:
        """Reads what `packed` gave.

        Raises:
            LayoutError: If the numbers make no sense; TypeError, ValueError or KeyError, if it
                is not that at all.
        """
        name, offset_bytes, shape, strides, *bits = packed
        conj, neg = bits or (False, False)
        strides = contiguous_strides(shape) if strides is None else strides
        return cls(DTYPES[name], shape, strides, offset_bytes, conj, neg).check()

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout.unpack, (self.packed,)

    @functools.cached_property
    def span_bytes(self) -> int:
        """Bytes from the first element to behind the last one."""
        return span_elements(self.shape, self.strides) * self.dtype.itemsize

    @functools.cached_property
    def end_bytes(self) -> int:
        """Bytes that a file must have to hold the tensor; an empty one needs none anywhere."""
        span = self.span_bytes
        return self.offset_bytes + span if span else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are those of a contiguous tensor."""
        return self.strides == contiguous_strides(self.shape)

    def moved(self, offset_bytes: int) -> Layout:
        """The same tensor at another place."""
        return replace(self, offset_bytes=offset_bytes)

    def check(self) -> Layout:
        """Gives itself if the numbers make sense.

        Raises:
            LayoutError: If a size or offset is negative or too large, or the offset does not
                suit the dtype.
        """
        dtype_name(self.dtype)
        if len(self.shape) != len(self.strides) or len(self.shape) > _MAX_DIMS:
            raise LayoutError(f"shape {self.shape} does not go with strides {self.strides}")
        numbers = (*self.shape, *self.strides, self.offset_bytes)
        if set(map(type, numbers)) != _ONLY_INT or min(numbers) < 0:
            raise LayoutError(
                f"shape {self.shape}, strides {self.strides} and offset {self.offset_bytes} "
                "must be integers that are not negative"
            )
        if self.end_bytes > _MAX_BYTES or numel(self.shape) > _MAX_BYTES:
            raise LayoutError(f"shape {self.shape} is larger than any file can be")
        if self.offset_bytes % alignment_bytes(self.dtype):
            raise LayoutError(
                f"an offset of {self.offset_bytes} bytes does not suit {self.dtype}",
                hint=f"It must be a multiple of {alignment_bytes(self.dtype)}.",
            )
        return self


_known = functools.lru_cache(maxsize=KEPT_LAYOUTS)(Layout)


def parse_size(size: tuple[Any, ...], shape: Any = None) -> tuple[int, ...] | torch.Tensor:
    """Reads the sizes of a constructor: ``(2, 3)``, ``((2, 3),)``, or ``shape=(2, 3)``.

    Returns:
        The sizes, or a 2-D int64 tensor with one element's sizes in each row (nested).

    Raises:
        TypeError: If no size was given, or it is not made of integers.
        LayoutError: If a size is negative.
    """
    if shape is not None:
        if size:
            raise TypeError("give the size either as arguments or as shape=, not both")
        size = (shape,)
    if not size:
        raise TypeError("a size is needed: integers, one sequence of integers, or shape=")
    if len(size) == 1 and not _is_index(size[0]):
        sequence = size[0]
        if isinstance(sequence, torch.Tensor) and sequence.ndim == 2:
            return check_nested_sizes(sequence)
        try:
            size = tuple(sequence)
        except TypeError:
            raise TypeError(f"a size must be made of integers, not {sequence!r}") from None
    try:
        sizes = tuple(map(operator.index, size))
    except TypeError:
        raise TypeError(f"a size must be made of integers, not {size!r}") from None
    if min(sizes, default=0) < 0:
        raise LayoutError(f"shape {sizes} has a negative size")
    return sizes


def _is_index(value: Any) -> bool:
    """Whether it is one integer: an int, a NumPy integer or a 0-d integer tensor."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    if not hasattr(value, "__index__"):
        return False
    try:
        operator.index(value)
    except TypeError:  # a NumPy array of several, for one
        return False
    return True


def check_nested_sizes(sizes: torch.Tensor) -> torch.Tensor:
    """Gives a nested shape back as a contiguous int64 CPU tensor.

    Raises:
        LayoutError: If it is not 2-D, not integer, or has a negative size.
    """
    if sizes.ndim != 2 or sizes.dtype.is_floating_point or sizes.dtype.is_complex:
        raise LayoutError(
            f"a nested shape is a 2-D integer tensor, a row an element, not {sizes.dtype} of "
            f"shape {tuple(sizes.shape)}"
        )
    sizes = sizes.detach().to("cpu", torch.int64).contiguous()
    if sizes.numel() and int(sizes.min()) < 0:
        raise LayoutError("a nested shape has a negative size")
    return sizes
