"""Rows and batches as the loaders of torch expect them, with one gather for a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from torch.utils.data._utils import collate

Batch = dict[str, Any]
"""A tensor of rows for each column."""


class Row(dict[str, Any]):
    """One row: a tensor for each column."""


class Rows(Sequence[Row]):
    """A batch that was gathered at once, as the list of rows that a ``collate_fn`` takes.

    torch's default collate function gives `batch` as it is, without a second copy.

    Attributes:
        batch: For each column the tensor of all rows.
    """

    __slots__ = ("_length", "batch")

    def __init__(self, batch: Batch, length: int) -> None:
        self.batch = batch
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> list[Row]: ...
    def __getitem__(self, i: int | slice) -> Row | list[Row]:
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(self._length))]
        if not -self._length <= i < self._length:
            raise IndexError(i)
        return Row({name: column[i] for name, column in self.batch.items()})

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(self._length))


def collate_rows(rows: Any, *, collate_fn_map: Any = None) -> Any:
    """Makes a batch of rows: without a copy if they were gathered at once."""
    if isinstance(rows, Rows):
        return dict(rows.batch)
    table = collate_fn_map or collate.default_collate_fn_map
    return collate.collate([dict(row) for row in rows], collate_fn_map=table)


collate.default_collate_fn_map[Row] = collate_rows


class Transform:
    """A function that is applied to what is read.

    Args:
        fn: Takes and gives a dict: of one row, or if `is_batched` of a batch.
        is_batched: Which of them.
    """

    __slots__ = ("fn", "is_batched")

    def __init__(self, fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        self.fn = fn
        self.is_batched = is_batched

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_transform, (self.fn, self.is_batched)

    def row(self, row: Mapping[str, Any]) -> Any:
        """Applies it to one row."""
        if not self.is_batched:
            return self.fn(row)
        batch = self.fn({name: value[None] for name, value in row.items()})
        return {name: values[0] for name, values in batch.items()}

    def batch(self, batch: Batch, length: int) -> Batch:
        """Applies it to a batch."""
        if self.is_batched:
            return dict(self.fn(batch))
        rows = [self.fn(row) for row in Rows(batch, length)]
        return dict(collate_rows(rows))


def _rebuild_transform(fn: Callable[[Any], Any], is_batched: bool) -> Transform:
    return Transform(fn, is_batched=is_batched)
