"""Datasets out of a dataset: other rows, other columns, another order, other values. No copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from mmrpc.data.batches import Transform
from mmrpc.data.order import Order, Pick, Range, Shuffle, Step
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Views(torch.utils.data.Dataset[Any]):
    """What `MappedDataset` can be turned into; its base class, whose own file is about reading."""

    _columns: dict[str, torch.Tensor]
    _order: Order
    _transforms: tuple[Transform, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._columns)

    def __len__(self) -> int:
        return self._order.length

    def _with(
        self, columns: dict[str, torch.Tensor], order: Order, transforms: tuple[Transform, ...]
    ) -> Self:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def _then(self, step: Step) -> Self:
        return self._with(self._columns, self._order.then(step), self._transforms)

    def select(self, rows: Iterable[int]) -> Self:
        """Shows chosen rows only, in the order given; nothing is copied.

        Args:
            rows: Their numbers; a `range` travels as such, others travel as they are.
        """
        if isinstance(rows, range) and rows.step > 0 and rows.start >= 0:
            stop = min(rows.stop, self._order.length)
            return self._then(Range(rows.start, max(rows.start, stop), rows.step))
        chosen = tuple(int(row) for row in rows)
        n = self._order.length
        if any(not -n <= row < n for row in chosen):
            raise IndexError(f"a row that a dataset with {n} rows does not have")
        return self._then(Pick(chosen))

    def select_columns(self, *names: str) -> Self:
        """Shows and sends some of the columns only.

        Raises:
            LayoutError: If there is no such column.
        """
        missing = [name for name in names if name not in self._columns]
        if missing or not names:
            raise LayoutError(f"there are no columns {missing}, only {tuple(self._columns)}")
        columns = {name: self._columns[name] for name in names}
        return self._with(columns, self._order, self._transforms)

    def shuffle(self, seed: int = 0) -> Self:
        """Shows the rows in a random order, which is the same everywhere for one seed."""
        return self._then(Shuffle(seed))

    def split(self, *parts: float, seed: int | None = None) -> list[Self]:
        """Splits the rows into several datasets; nothing is copied.

        Args:
            *parts: Fractions that sum to 1, or numbers of rows that sum to all.
            seed: For splitting a shuffled order; None for ranges of the order that there is.

        Raises:
            LayoutError: If they do not sum up, or one is negative.
        """
        base = self if seed is None else self.shuffle(seed)
        out, start = [], 0
        for stop in _ends(parts, self._order.length):
            out.append(base._then(Range(start, stop, 1)))
            start = stop
        return out

    def shard(self, rank: int | None = None, world_size: int | None = None) -> Self:
        """The part of one rank: a range, so that each rank reads its own pages.

        Args:
            rank: Which part; None for the rank of this RPC worker or process group.
            world_size: How many parts, of which no two differ by more than one row.

        Raises:
            LayoutError: If there is no such rank, or none is known.
        """
        from mmrpc.data.ranks import rank_and_world_size

        rank, world_size = rank_and_world_size(rank, world_size)
        n = self._order.length
        return self._then(Range(n * rank // world_size, n * (rank + 1) // world_size, 1))

    def map(self, fn: Callable[[Any], Any], *, batched: bool = False) -> Self:
        """Applies a function to what is read, each time it is read.

        Args:
            fn: Takes and gives a dict of tensors: of one row, or if `batched` of a batch. It must
                be importable to travel, and may not change its argument in place if `mode` is
                ``"r+"``.
            batched: Whether it takes batches, which is faster; single rows are given to it as
                batches of one.
        """
        transforms = (*self._transforms, Transform(fn, is_batched=batched))
        return self._with(self._columns, self._order, transforms)


def _ends(parts: Sequence[float], rows: int) -> list[int]:
    """Where the parts of a split end."""
    if any(part < 0 for part in parts):
        raise LayoutError(f"{parts} has a negative part")
    if all(isinstance(part, int) for part in parts) and sum(parts) == rows:
        ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    elif abs(sum(parts) - 1) < 1e-6:
        ends = [round(sum(parts[: i + 1]) * rows) for i in range(len(parts))]
    else:
        raise LayoutError(
            f"{parts} are neither fractions that sum to 1 nor counts that sum to {rows}"
        )
    return [int(end) for end in ends]
