"""Writing a dataset from many processes at once, on one host or several: each its range of rows.

`plan` makes the files in full length. Each process claims a range, writes it and marks it done;
whoever finishes last counts the rows into ``meta.json``, and only then is there a dataset.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Final, Self

from mmrpc.core import creation
from mmrpc.core.trees import directory as treedir
from mmrpc.core.trees import meta as treemeta
from mmrpc.data import claims
from mmrpc.data.columnfile import ColumnFile
from mmrpc.data.schema import Column, Schema, dump_columns, load_columns
from mmrpc.data.writer import as_column
from mmrpc.errors import LayoutError, PathExistsError, PathNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    import torch

    from mmrpc.core.creation import Filename

_STATE: Final = ".writing"
_PLAN: Final = "plan.json"
_RANGE = re.compile(r"(?P<start>\d+)-(?P<stop>\d+)\.(?P<kind>claim|done)")


def plan(
    directory: Filename,
    rows: int,
    columns: Mapping[str, Column | tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    """Makes the files of a dataset that several processes will fill; one process calls it first.

    Args:
        directory: The dataset's; made if it is missing, but not its parents.
        rows: Rows of the whole dataset.
        columns: Dtype and row shape of each column.

    Raises:
        PathExistsError: If a dataset, or a plan of one, is there.
        NoSpaceError: If the space for all rows cannot be reserved; nothing is left behind.
    """
    if rows < 0 or not columns:
        raise LayoutError(f"a dataset of {rows} rows and {len(columns)} columns cannot be")
    schema = Schema({name: as_column(column) for name, column in columns.items()}, rows)
    path = creation.absolute_path(directory, writing=True)
    made_directory = treedir.make_directory(path)
    if os.path.lexists(os.path.join(path, treemeta.META)):
        raise PathExistsError(
            "a dataset is there already", path=path, hint="Remove it, or choose another directory."
        )
    state = os.path.join(path, _STATE)
    if not treedir.make_directory(state):
        raise PathExistsError(
            "a dataset is being written there",
            path=path,
            hint=f"If nobody is writing any more, remove {state!r}.",
        )
    files: list[ColumnFile] = []
    try:
        for name, column in schema.columns.items():
            file = ColumnFile(path, name, column, create=True)
            files.append(file)
            file.reserve(0, rows * column.row_bytes)
        text = json.dumps({"rows": rows, "columns": dump_columns(schema.columns)})
        treedir.write_small(os.path.join(state, _PLAN), text.encode(), durable=True)
    except BaseException:
        for file in files:
            file.remove()
        shutil.rmtree(state, ignore_errors=True)
        if made_directory:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise
    finally:
        for file in files:
            file.close()


def read_plan(directory: str) -> Schema:
    """Reads what `plan` wrote.

    Raises:
        PathNotFoundError: If nothing is planned there, or all of it is done.
        LayoutError: If it is malformed.
    """
    path = os.path.join(directory, _STATE, _PLAN)
    try:
        text = treedir.read_small(path)
    except PathNotFoundError:
        raise PathNotFoundError(
            "no dataset is being written there",
            path=directory,
            hint="Call plan() once, before the processes write.",
        ) from None
    try:
        fields = json.loads(text)
        rows = int(fields["rows"])
    except (ValueError, KeyError, TypeError):
        raise LayoutError(f"{path!r} is malformed") from None
    return Schema(load_columns(fields.get("columns"), path), rows)


class RangeWriter:
    """Writes one range of rows of a planned dataset; a context manager.

    If it ends with an exception, or is killed, its range can be written again, from its start.

    Args:
        directory: The dataset's, as given to `plan`.
        start: First row of the range.
        stop: Row behind the last one.

    Attributes:
        directory: Its absolute path.

    Raises:
        PathNotFoundError: If nothing is planned there.
        PathExistsError: If the range, or a part of it, is someone else's or done.
        LayoutError: If the dataset has no such rows.
    """

    def __init__(self, directory: Filename, start: int, stop: int) -> None:
        self.directory = creation.absolute_path(directory, writing=True)
        self._schema = read_plan(self.directory)
        if not 0 <= start <= stop <= self._schema.rows:
            raise LayoutError(f"there are no rows {start} to {stop} among {self._schema.rows}")
        self._range = f"{start}-{stop}"
        self._next, self._stop = start, stop
        self._state = os.path.join(self.directory, _STATE)
        self._claim = os.path.join(self._state, f"{self._range}.claim")
        self._refuse_overlap(start, stop)
        claims.claim(self._claim, f"the range {self._range}")
        self._pid = os.getpid()
        self._files: dict[str, ColumnFile] = {}
        try:
            # Again: two who looked at once see each other now.
            self._refuse_overlap(start, stop)
            for name, column in self._schema.columns.items():
                self._files[name] = ColumnFile(self.directory, name, column, create=False)
        except BaseException:
            self._end()
            raise

    def _refuse_overlap(self, start: int, stop: int) -> None:
        for other_start, other_stop, kind in _ranges(self._state):
            is_own = (other_start, other_stop, kind) == (start, stop, "claim")
            if not is_own and max(start, other_start) < min(stop, other_stop):
                what = "written already" if kind == "done" else "someone else's"
                raise PathExistsError(
                    f"the rows {other_start} to {other_stop} are {what}", path=self.directory
                )

    def write(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Writes the next rows of the range.

        Raises:
            LayoutError: If they have other columns, or are more than the range has left.
        """
        batch = {name: creation.check_source(tensor) for name, tensor in batch.items()}
        rows = self._schema.check_batch(batch)
        if self._next + rows > self._stop:
            raise LayoutError(
                f"{rows} rows were given and the range has {self._stop - self._next} left"
            )
        for name, tensor in batch.items():
            self._files[name].write(self._next, tensor)
        self._next += rows

    def close(self) -> None:
        """Marks the range done; the last range to be done makes the dataset visible.

        Raises:
            LayoutError: If rows are missing; the range is then not done.
        """
        if not self._files:
            return
        try:
            if self._next != self._stop:
                raise LayoutError(
                    f"the range {self._range} lacks its last {self._stop - self._next} rows"
                )
            for file in self._files.values():
                file.sync()
            done = os.path.join(self._state, f"{self._range}.done")
            treedir.write_small(done, b"", durable=True)
        finally:
            self._end()
        _publish_if_done(self.directory, self._schema)

    def _end(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
        claims.release(self._claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def __del__(self) -> None:
        # A forked child has a copy of the writer, but not its claim.
        if getattr(self, "_files", None) and self._pid == os.getpid():
            self._end()


def _ranges(state: str) -> Iterator[tuple[int, int, str]]:
    try:
        names = os.listdir(state)
    except FileNotFoundError:  # the last one finished, and the dataset is there
        return
    for name in names:
        match = _RANGE.fullmatch(name)
        if match is not None:
            yield int(match["start"]), int(match["stop"]), match["kind"]


def missing_rows(directory: Filename) -> list[tuple[int, int]]:
    """The ranges of a planned dataset that nobody has finished yet, claimed ones among them.

    Raises:
        PathNotFoundError: If nothing is planned there, or all of it is done.
    """
    path = creation.absolute_path(directory)
    return _gaps(os.path.join(path, _STATE), read_plan(path).rows)


def _gaps(state: str, rows: int) -> list[tuple[int, int]]:
    gaps, end = [], 0
    done = sorted((start, stop) for start, stop, kind in _ranges(state) if kind == "done")
    for start, stop in done:
        if start > end:
            gaps.append((end, start))
        end = max(end, stop)
    if end < rows:
        gaps.append((end, rows))
    return gaps


def _publish_if_done(directory: str, schema: Schema) -> None:
    state = os.path.join(directory, _STATE)
    if not os.path.isdir(state) or _gaps(state, schema.rows):
        return
    # Two who finish at once both write it, with the same content.
    treedir.write_small(os.path.join(directory, treemeta.META), schema.dump(), durable=True)
    shutil.rmtree(state, ignore_errors=True)


__all__ = ["RangeWriter", "missing_rows", "plan", "read_plan"]
