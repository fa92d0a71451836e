"""Which rows of its columns a dataset shows, and in which order: a few steps, not a list of rows.

The steps are what travels: a shuffled half of a billion rows is sent as two of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mmrpc.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Range:
    """Every `step`-th row from `start` up to `stop`."""

    start: int
    stop: int
    step: int

    def length(self, rows: int) -> int:
        """Rows that remain of so many."""
        return len(range(self.start, self.stop, self.step))

    def apply(self, index: torch.Tensor) -> torch.Tensor:
        """The rows that remain."""
        return index[self.start : self.stop : self.step]


@dataclass(frozen=True, slots=True)
class Shuffle:
    """A permutation, the same on every machine for the same seed."""

    seed: int

    def length(self, rows: int) -> int:
        """All of them."""
        return rows

    def apply(self, index: torch.Tensor) -> torch.Tensor:
        """The rows in their new order."""
        generator = torch.Generator().manual_seed(self.seed)
        return index[torch.randperm(len(index), generator=generator)]


@dataclass(frozen=True, slots=True)
class Pick:
    """Chosen rows, by number; this step is as long as they are many."""

    rows: tuple[int, ...]

    def length(self, rows: int) -> int:
        """Rows that were chosen."""
        return len(self.rows)

    def apply(self, index: torch.Tensor) -> torch.Tensor:
        """The chosen rows."""
        return index[torch.tensor(self.rows, dtype=torch.int64)]


Step = Range | Shuffle | Pick


class Order:
    """The steps from the rows of the columns to the rows that are shown.

    Attributes:
        rows: Rows of the columns.
        steps: In the order in which they were taken.
        length: Rows that are shown.
    """

    __slots__ = ("_index", "length", "rows", "steps")

    def __init__(self, rows: int, steps: tuple[Step, ...] = ()) -> None:
        self.rows = rows
        self.steps = steps
        self.length = rows
        for step in steps:
            self.length = step.length(self.length)
        self._index: torch.Tensor | None = None

    def then(self, step: Step) -> Order:
        """The order with a further step."""
        return Order(self.rows, (*self.steps, step))

    @property
    def span(self) -> tuple[int, int, int] | None:
        """Start, stop and step in the columns, if the rows are a plain range of them."""
        shown = range(self.rows)
        for step in self.steps:
            if not isinstance(step, Range):
                return None
            shown = shown[step.start : step.stop : step.step]
        return shown.start, shown.stop, shown.step

    @property
    def index(self) -> torch.Tensor:
        """The rows in the columns, as a 1-D int64 tensor; made once."""
        if self._index is None:
            index = torch.arange(self.rows)
            for step in self.steps:
                index = step.apply(index)
            self._index = index
        return self._index

    def row(self, i: int) -> int:
        """Where one row is in the columns.

        Raises:
            IndexError: If there is no such row.
        """
        n = self.length
        if not -n <= i < n:
            raise IndexError(f"row {i} of a dataset with {n} rows")
        i = i % n
        if not self.steps:
            return i
        span = self.span
        return span[0] + i * span[2] if span else int(self.index[i])

    def list_of(self, rows: Any) -> torch.Tensor:
        """Reads several rows' numbers, as they are given.

        Args:
            rows: A sequence of ints, or a 1-D tensor or array of ints or of booleans.

        Returns:
            A 1-D int64 tensor, whose numbers are not checked.

        Raises:
            IndexError: If a mask has another length.
            LayoutError: If it is no list of rows.
        """
        try:
            index = rows if isinstance(rows, torch.Tensor) else torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):
            raise _no_rows(rows) from None
        if index.dtype is torch.int64 and index.dim() == 1:
            return index
        if index.dtype is torch.bool:
            if index.shape != (self.length,):
                raise IndexError(f"a mask of shape {tuple(index.shape)} for {self.length} rows")
            return index.nonzero()[:, 0]
        if index.numel() == 0:
            return torch.empty(0, dtype=torch.int64)
        if index.dim() != 1 or index.is_floating_point() or index.is_complex():
            raise _no_rows(rows)
        return index.to(torch.int64)

    def check(self, index: torch.Tensor) -> torch.Tensor:
        """Gives rows' numbers without negative ones.

        Raises:
            IndexError: If there is no such row.
        """
        if index.numel() == 0:
            return index
        low, high = (int(n) for n in torch.aminmax(index))
        if low < -self.length or high >= self.length:
            bad = low if low < -self.length else high
            raise IndexError(f"row {bad} of a dataset with {self.length} rows")
        return torch.where(index < 0, index + self.length, index) if low < 0 else index

    def place(self, index: torch.Tensor) -> torch.Tensor:
        """Where rows are in the columns."""
        return self.index[index] if self.steps else index


def _no_rows(rows: Any) -> LayoutError:
    return LayoutError(f"rows are chosen by a 1-D list of integers, not {rows!r:.80}")
