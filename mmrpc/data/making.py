"""Datasets out of tensors, iterables and files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from mmrpc.core import formats
from mmrpc.data.schema import rows_of
from mmrpc.data.writer import DatasetWriter
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    from mmrpc.core.creation import Filename

_BATCH_BYTES: Final = 64 << 20


def write_batches(
    directory: Filename,
    batches: Iterable[Mapping[str, torch.Tensor]],
    *,
    existsok: bool,
    progress: bool,
    total_rows: int | None,
) -> None:
    """Writes what an iterable gives; see `MappedDataset.from_batches`."""
    with (
        DatasetWriter(directory, existsok=existsok) as writer,
        progress_bar(writer.directory, total_rows, shown=progress) as advance,
    ):
        for batch in batches:
            writer.append(batch)
            advance(rows_of(batch))


def batches_of(columns: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Cuts columns into batches of bounded size; at least one, so that the columns are known."""
    rows = rows_of(columns)
    row_bytes = sum(column.nbytes for column in columns.values()) // max(rows, 1)
    step = max(_BATCH_BYTES // max(row_bytes, 1), 1)
    for start in range(0, max(rows, 1), step):
        yield {name: column[start : start + step] for name, column in columns.items()}


def columns_of(files: Filename | Mapping[str, Filename]) -> dict[str, torch.Tensor]:
    """Maps the columns that are in files.

    Raises:
        LayoutError: If a file has no such tensor, or several.
    """
    if not isinstance(files, Mapping):
        found = formats.open(files)
        if not isinstance(found, dict):
            raise LayoutError(
                f"{str(files)!r} has one tensor without a name",
                hint="Name its column: {'x': path}.",
            )
        return _only_tensors(found, str(files))
    return {name: _column_of(name, path) for name, path in files.items()}


def _column_of(name: str, path: Filename) -> torch.Tensor:
    found = formats.open(path)
    if isinstance(found, dict):
        found = found.get(name)
    if not isinstance(found, torch.Tensor):
        raise LayoutError(f"{str(path)!r} has no tensor {name!r}")
    return found


def _only_tensors(found: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    others = [name for name, value in found.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise LayoutError(f"{path!r} holds {others[0]!r}, which is no tensor")
    return found


@contextlib.contextmanager
def progress_bar(
    what: str, total_rows: int | None, *, shown: bool
) -> Iterator[Callable[[int], None]]:
    """Shows how many rows were written, on standard error; gives what to call with more rows."""
    if not shown:
        yield lambda rows: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("{task.completed:,.0f} rows"),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total_rows)
        yield lambda rows: bar.advance(task, rows)
