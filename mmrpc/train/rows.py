"""Memory for the rows of a sparse gradient, which grows with the largest batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mmrpc.core.tensor import MemoryMappedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmrpc.train.messages import Rows

_LEAST_ROWS = 64


class RowMemory:
    """Row numbers and their values in anonymous shared memory, to be sent by reference.

    Args:
        dtype: Of the values.
        row_shape: Sizes of one row.
    """

    def __init__(self, dtype: torch.dtype, row_shape: Sequence[int]) -> None:
        self._dtype, self._row_shape = dtype, tuple(row_shape)
        self._capacity = 0

    def write(self, numbers: torch.Tensor, values: torch.Tensor) -> Rows:
        """Copies rows into the memory; gives views of it, valid until the next call.

        Args:
            numbers: Row numbers, int64 [n].
            values: Their values [n, ...].

        Raises:
            NoSpaceError: If there is too little memory.
        """
        count = len(numbers)
        if count > self._capacity:
            capacity = max(_LEAST_ROWS, 1 << (count - 1).bit_length())
            self._numbers = MemoryMappedTensor.empty(capacity, dtype=torch.int64)
            self._values = MemoryMappedTensor.empty((capacity, *self._row_shape), dtype=self._dtype)
            self._capacity = capacity
        self._numbers[:count].copy_(numbers)
        self._values[:count].copy_(values)
        return self._numbers[:count], self._values[:count]
