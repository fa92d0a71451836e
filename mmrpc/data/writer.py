"""Writing a dataset row after row: one writer, any number of readers, who see complete rows only.

Rows go behind those that are there, and become visible when ``meta.json`` is replaced by one
that counts them. A writer that is killed leaves rows that nobody counts, and the next one
overwrites them.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final, Self

from mmrpc.core import creation
from mmrpc.core.trees import directory as treedir
from mmrpc.core.trees import meta as treemeta
from mmrpc.data import claims
from mmrpc.data.columnfile import ColumnFile, unlink
from mmrpc.data.schema import Column, Schema, rows_of
from mmrpc.errors import LayoutError, MmrpcError, PathExistsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import torch

    from mmrpc.core.creation import Filename

CLAIM: Final = ".writer"


class DatasetWriter:
    """Appends rows to a new or an existing dataset.

    A context manager: leaving it closes the dataset; leaving it with an exception drops what was
    not committed.

        with DatasetWriter("digits") as writer:
            for images, labels in batches:
                writer.append({"image": images, "label": labels})

    Args:
        directory: The dataset's; made if it is missing, but not its parents.
        columns: Dtype and row shape of each column. None to take them from the first batch, or
            from the dataset that is there.
        append: Whether rows may be added to a dataset that is there.
        existsok: Whether a dataset that is there is replaced. Who mapped it keeps its rows.

    Attributes:
        directory: Its absolute path.

    Raises:
        PathExistsError: If a dataset is there, or another process is writing it.
        LayoutError: If it is there with other columns.
    """

    def __init__(
        self,
        directory: Filename,
        columns: Mapping[str, Column | tuple[torch.dtype, tuple[int, ...]]] | None = None,
        *,
        append: bool = False,
        existsok: bool = False,
    ) -> None:
        if append and existsok:
            raise LayoutError("a dataset is either appended to or replaced")
        self.directory = creation.absolute_path(directory, writing=True)
        self._made_directory = treedir.make_directory(self.directory)
        self._claim = os.path.join(self.directory, CLAIM)
        self._files: dict[str, ColumnFile] = {}
        self._schema: Schema | None = None
        self._rows = 0
        self._is_open = True
        self._pid = os.getpid()
        try:
            claims.claim(self._claim, "the dataset")
        except BaseException:
            self._leave()
            raise
        try:
            self._start(columns, append=append, existsok=existsok)
        except BaseException:
            self._close_files()
            claims.release(self._claim)
            self._leave()
            raise

    def _start(self, columns: Mapping[str, Any] | None, *, append: bool, existsok: bool) -> None:
        wanted = None if columns is None else {n: as_column(c) for n, c in columns.items()}
        meta = os.path.join(self.directory, treemeta.META)
        if os.path.lexists(meta):
            there = Schema.read(meta)
            if append:
                if wanted not in (None, there.columns):
                    raise LayoutError(f"the dataset in {self.directory!r} has other columns")
                self._open(there, create=False)
                return
            if not existsok:
                raise PathExistsError(
                    "a dataset is there already",
                    path=self.directory,
                    hint="Pass existsok=True to replace it, or append=True to a DatasetWriter.",
                )
            unlink(meta)
            for name in there.columns:
                unlink(treedir.leaf_path(self.directory, name))
        if wanted is not None:
            self._open(Schema(wanted, is_closed=False), create=True)

    def _open(self, schema: Schema, *, create: bool) -> None:
        if not schema.columns:
            raise LayoutError("a dataset needs a column")
        names = {treemeta.file_stem(name) for name in schema.columns}
        if len(names) < len(schema.columns):
            raise LayoutError("two columns would share a file")
        for name, column in schema.columns.items():
            if create:
                # Of a writer that was killed before it told anyone: no reader can have it.
                unlink(treedir.leaf_path(self.directory, name))
            file = ColumnFile(self.directory, name, column, create=create)
            self._files[name] = file
            file.cut(schema.rows)
        self._schema, self._rows = schema, schema.rows

    @property
    def rows(self) -> int:
        """Rows so far, committed or not."""
        return self._rows

    def append(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Writes rows behind the others; readers see them after `commit` or `close`.

        Args:
            batch: For each column a tensor of rows.

        Raises:
            LayoutError: If the columns are others than before.
            NoSpaceError: If there is too little space. The rows before are kept, and the writer
                can go on.
        """
        self._check_open()
        batch = {name: creation.check_source(tensor) for name, tensor in batch.items()}
        schema = self._schema
        if schema is None:
            rows_of(batch)
            schema = Schema({name: Column.of(tensor) for name, tensor in batch.items()})
            self._open(schema, create=True)
        rows = schema.check_batch(batch)
        try:
            for name, tensor in batch.items():
                self._files[name].write(self._rows, tensor)
        except BaseException:
            for file in self._files.values():
                file.cut(self._rows)
            raise
        self._rows += rows

    def commit(self) -> int:
        """Makes all rows so far visible to those who open the dataset from now on.

        They are on the device before they are counted, so that also a crash of the machine
        leaves complete rows only.

        Returns:
            The number of rows.
        """
        self._check_open()
        return self._publish(is_closed=False)

    def _publish(self, *, is_closed: bool) -> int:
        if self._schema is None:
            raise LayoutError(
                f"nothing was written to {self.directory!r}, and its columns are unknown",
                hint="Pass columns= for a dataset that may have no rows.",
            )
        for file in self._files.values():
            file.sync()
        schema = self._schema.with_rows(self._rows, is_closed=is_closed)
        meta = os.path.join(self.directory, treemeta.META)
        treedir.write_small(meta, schema.dump(), durable=True)
        self._schema = schema
        return self._rows

    def close(self) -> None:
        """Commits, and ends the writing; each file is exactly as long as its rows."""
        if not self._is_open:
            return
        try:
            self._publish(is_closed=True)
        except BaseException:
            self.abort()
            raise
        self._end()

    def abort(self) -> None:
        """Ends the writing without what was not committed."""
        if not self._is_open:
            return
        meta, committed = os.path.join(self.directory, treemeta.META), 0
        with contextlib.suppress(MmrpcError):
            committed = Schema.read(meta).rows
        for file in self._files.values():
            if os.path.lexists(meta):
                file.cut(committed)
            else:
                file.remove()
        self._end()
        self._leave()

    def _end(self) -> None:
        self._is_open = False
        self._close_files()
        claims.release(self._claim)

    def _leave(self) -> None:
        if self._made_directory:
            with contextlib.suppress(OSError):  # not empty: something is there after all
                os.rmdir(self.directory)

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise MmrpcError("the writer is closed")

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
            self.abort()

    def __del__(self) -> None:
        # Not closed: the files go, and what was not committed is nobody's. A forked child has a
        # copy of the writer, but not its claim.
        if getattr(self, "_is_open", False) and getattr(self, "_pid", 0) == os.getpid():
            self._end()


def as_column(column: Column | tuple[torch.dtype, tuple[int, ...]]) -> Column:
    """Reads a column's dtype and row shape.

    Raises:
        LayoutError: If it is no column.
    """
    if isinstance(column, Column):
        return column
    try:
        dtype, row_shape = column
        return Column(dtype, tuple(row_shape))
    except (TypeError, ValueError):
        raise LayoutError(
            f"{column!r} is no column", hint="Give (dtype, shape of a row), or a Column."
        ) from None
