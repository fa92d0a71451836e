"""What a dataset's columns are: names, dtypes and row shapes. Pure data, and its ``meta.json``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from mmrpc.core.layout import DTYPES, dtype_name, numel
from mmrpc.core.trees import directory as treedir
from mmrpc.core.trees import meta as treemeta
from mmrpc.core.trees.meta import Leaf, Meta
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_EXTRA_KEY: Final = "dataset"


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        dtype: Of its elements.
        row_shape: Sizes of one row.

    Raises:
        LayoutError: If a size is negative.
    """

    dtype: torch.dtype
    row_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.row_shape):
            raise LayoutError(f"a row of shape {self.row_shape} cannot be")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return numel(self.row_shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Column:
        """The column that a tensor of rows belongs to."""
        return cls(tensor.dtype, tuple(tensor.shape[1:]))


@dataclass(frozen=True, slots=True)
class Schema:
    """All columns of a dataset, and how many rows they have.

    Attributes:
        columns: By name.
        rows: Number of rows; all of them are complete.
        is_closed: Whether its writer was done; if not, more rows may come.
    """

    columns: dict[str, Column]
    rows: int = 0
    is_closed: bool = True

    def with_rows(self, rows: int, *, is_closed: bool) -> Schema:
        """The same columns with another number of rows."""
        return replace(self, rows=rows, is_closed=is_closed)

    def check_batch(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Checks that a batch has these columns; gives its number of rows.

        Raises:
            LayoutError: If it has not.
        """
        rows = rows_of(batch)
        if batch.keys() != self.columns.keys():
            raise LayoutError(
                f"the batch has {_names(batch)}, and the dataset {_names(self.columns)}"
            )
        for name, tensor in batch.items():
            if Column.of(tensor) != self.columns[name]:
                column = self.columns[name]
                raise LayoutError(
                    f"column {name!r} has rows of {column.dtype} and shape {column.row_shape}, and "
                    f"the batch {tensor.dtype} and {tuple(tensor.shape[1:])}"
                )
        return rows

    def dump(self) -> bytes:
        """As a ``meta.json``, which tensordict reads too."""
        leaves = {
            name: Leaf(column.dtype, (self.rows, *column.row_shape))
            for name, column in self.columns.items()
        }
        extra = {_EXTRA_KEY: {"closed": self.is_closed}}
        return treemeta.dump(Meta(leaves, (), (self.rows,), extra))

    @classmethod
    def read(cls, path: str) -> Schema:
        """Reads a ``meta.json``.

        Raises:
            PathNotFoundError: If it is not there.
            LayoutError: If it is not that of columns of equal length.
        """
        meta = treemeta.parse(treedir.read_meta_text(path, "dataset"), path)
        where = path
        if not meta.leaves:
            raise LayoutError(f"{where!r} names no tensors")
        for name, leaf in meta.leaves.items():
            if leaf.is_nested or not leaf.shape:
                raise LayoutError(f"{where!r}: {name!r} has no rows")
        lengths = {leaf.shape[0] for leaf in meta.leaves.values()}
        if len(lengths) > 1:
            raise LayoutError(f"{where!r}: the columns have {sorted(lengths)} rows")
        columns = {name: Column(leaf.dtype, leaf.shape[1:]) for name, leaf in meta.leaves.items()}
        ours = meta.extra.get(_EXTRA_KEY)
        is_closed = ours.get("closed", True) is True if isinstance(ours, dict) else True
        return cls(columns, lengths.pop(), is_closed)


def rows_of(batch: Mapping[str, torch.Tensor]) -> int:
    """The number of rows that all columns of a batch have.

    Raises:
        LayoutError: If it has no columns, or they differ, or one is no tensor.
    """
    for name, tensor in batch.items():
        if not hasattr(tensor, "dim"):
            raise LayoutError(
                f"column {name!r} is of type {type(tensor).__name__}",
                hint="Make it a tensor, for example by torch.as_tensor.",
            )
    lengths = {name: len(tensor) if tensor.dim() else -1 for name, tensor in batch.items()}
    if not lengths or len(set(lengths.values())) > 1 or -1 in lengths.values():
        told = ", ".join(f"{n} in {name!r}" for name, n in lengths.items() if n >= 0) or "none"
        raise LayoutError(f"the columns of a batch must have the same number of rows, not {told}")
    return next(iter(lengths.values()))


def _names(columns: Mapping[str, Any]) -> str:
    return f"the columns {', '.join(map(repr, sorted(columns)))}"


def dump_columns(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Columns as plain values."""
    return {
        name: {"dtype": dtype_name(column.dtype), "row_shape": list(column.row_shape)}
        for name, column in columns.items()
    }


def load_columns(fields: Any, where: str) -> dict[str, Column]:
    """Reads what `dump_columns` gave.

    Raises:
        LayoutError: If it is not that.
    """
    try:
        return {
            str(name): Column(DTYPES[column["dtype"]], tuple(map(int, column["row_shape"])))
            for name, column in fields.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise LayoutError(f"{where!r} is malformed") from None
