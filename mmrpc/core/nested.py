"""Nested tensors in a run of bytes: one buffer, and each element's sizes, strides and offset.

Torch's strided nested tensors are meant; the jagged layout has no views that a file could hold.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mmrpc.core.layout import (
    DTYPES,
    KEPT_LAYOUTS,
    Layout,
    contiguous_strides,
    dtype_name,
    numel,
    span_elements,
)
from mmrpc.core.storage import tensor_of
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    from mmrpc.core.mapping import Mapping

Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class NestedLayout:
    """A strided nested tensor in a run of bytes.

    Attributes:
        dtype: Type of the elements.
        sizes: Sizes, a row for each component.
        strides: Strides in elements, a row for each component.
        offsets: Where each component starts, in elements from `offset_bytes`.
        offset_bytes: Where the buffer starts in the file or memory.
    """

    dtype: torch.dtype
    sizes: Sizes
    strides: Sizes
    offsets: tuple[int, ...]
    offset_bytes: int = 0

    # Not a number of fields that a packed dense layout has.
    PACKED_LENGTH: ClassVar[int] = 5

    @classmethod
    def contiguous(
        cls, dtype: torch.dtype, sizes: torch.Tensor, offset_bytes: int = 0
    ) -> NestedLayout:
        """The layout of components that lie one behind the other, checked."""
        rows = tuple(map(tuple, sizes.tolist()))
        offsets, end = [], 0
        for row in rows:
            offsets.append(end)
            end += numel(row)
        strides = tuple(map(contiguous_strides, rows))
        return cls(dtype, rows, strides, tuple(offsets), offset_bytes).check()

    @classmethod
    def of(cls, tensor: torch.Tensor, start_bytes: int) -> NestedLayout:
        """The layout of an existing nested tensor whose storage starts at `start_bytes`."""
        return cls(
            tensor.dtype,
            tuple(map(tuple, tensor._nested_tensor_size().tolist())),
            tuple(map(tuple, tensor._nested_tensor_strides().tolist())),
            tuple(tensor._nested_tensor_storage_offsets().tolist()),
            start_bytes,
        )

    @property
    def span_bytes(self) -> int:
        """Bytes from the start of the buffer to behind the last element."""
        ends = (
            offset + span
            for sizes, strides, offset in zip(self.sizes, self.strides, self.offsets, strict=True)
            if (span := span_elements(sizes, strides))
        )
        return max(ends, default=0) * self.dtype.itemsize

    @property
    def end_bytes(self) -> int:
        """Bytes that a file must have to hold the tensor; an empty one needs none anywhere."""
        span = self.span_bytes
        return self.offset_bytes + span if span else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the components lie one behind the other, each contiguous."""
        end = 0
        for sizes, strides, offset in zip(self.sizes, self.strides, self.offsets, strict=True):
            if offset != end or strides != contiguous_strides(sizes):
                return False
            end += numel(sizes)
        return True

    def moved(self, offset_bytes: int) -> NestedLayout:
        """The same tensor at another place."""
        return replace(self, offset_bytes=offset_bytes)

    def check(self) -> NestedLayout:
        """Gives itself if the numbers make sense.

        Raises:
            LayoutError: If a size or offset is negative or too large, or rows differ in length.
        """
        if not len(self.sizes) == len(self.strides) == len(self.offsets):
            raise LayoutError("a nested shape needs sizes, strides and an offset for each row")
        if len({len(row) for row in self.sizes}) > 1:
            raise LayoutError("the rows of a nested shape must have the same length")
        for sizes, strides, offset in zip(self.sizes, self.strides, self.offsets, strict=True):
            Layout(self.dtype, sizes, strides, offset * self.dtype.itemsize).check()
        Layout(self.dtype, (), (), self.offset_bytes).check()
        if self.end_bytes >= 2**63:
            raise LayoutError("the nested shape is larger than any file can be")
        return self

    def sizes_tensor(self) -> torch.Tensor:
        """Sizes as the 2-D int64 tensor that constructors take."""
        return _matrix(self.sizes)

    def view_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The nested tensor on a 1-D contiguous tensor that holds its elements."""
        return torch._nested_view_from_buffer(
            buffer,
            self.sizes_tensor(),
            _matrix(self.strides),
            torch.tensor(self.offsets, dtype=torch.int64, device="cpu"),
        )

    @property
    def packed(self) -> tuple[Any, ...]:
        """It as plain values, for a reference."""
        if self.is_contiguous:
            return dtype_name(self.dtype), self.offset_bytes, self.sizes, None, None
        return dtype_name(self.dtype), self.offset_bytes, self.sizes, self.strides, self.offsets

    @classmethod
    @functools.lru_cache(maxsize=KEPT_LAYOUTS)
    def unpack(cls, packed: tuple[Any, ...]) -> NestedLayout:
        """Reads what `packed` gave; see `Layout.unpack`."""
        name, offset_bytes, sizes, strides, offsets = packed
        if strides is None:
            return cls.contiguous(DTYPES[name], _matrix(sizes), offset_bytes)
        return cls(DTYPES[name], sizes, strides, offsets, offset_bytes).check()


def _matrix(rows: Sizes) -> torch.Tensor:
    width = len(rows[0]) if rows else 0
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), width)


def nested_tensor_of(mapping: Mapping, layout: NestedLayout) -> torch.Tensor:
    """Makes a plain nested tensor on its own piece of a mapping; nothing is copied."""
    count = layout.span_bytes // layout.dtype.itemsize
    return layout.view_of(
        tensor_of(mapping, Layout.contiguous(layout.dtype, (count,), layout.offset_bytes))
    )
