"""`MappedDataset`: named columns of equal length, mapped, and sent to other nodes by reference."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

import torch

from mmrpc.core import creation, formats, reference, upkeep
from mmrpc.core.standin import Unopened, unpickling_for_rpc
from mmrpc.core.tensor import MemoryMappedTensor, wrap
from mmrpc.core.trees import directory as treedir
from mmrpc.core.trees import meta as treemeta
from mmrpc.data.batches import Batch, Rows, Transform
from mmrpc.data.order import Order, Range
from mmrpc.data.schema import Schema, rows_of
from mmrpc.data.views import Views
from mmrpc.errors import LayoutError, PathNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mmrpc.core.creation import Filename
    from mmrpc.data.sharing import SharedDataset


class MappedDataset(Views):
    """Named columns of equal length as mapped tensors; any number of rows, also beyond RAM.

    ``ds[i]`` is a row and ``ds[a:b]`` a batch, both views of the files; ``ds[[3, 1, 4]]`` and
    ``ds[tensor]`` gather a batch into new memory. ``ds["name"]`` is a whole column. A `DataLoader`
    reads a batch with one gather.

    Pickling it, for workers of a loader or for RPC, sends references to the files, whatever their
    size. It belongs to whoever has the files; nothing here deletes them.

    Args:
        directory: What `DatasetWriter`, `mmrpc.save_tree` or tensordict's ``memmap`` wrote; or its
            URL, such as ``mount://data/train``, which each node looks up in its own mounts.
        mode: ``"r"``: writes to what is read stay in this process. ``"r+"``: they reach the files.

    Attributes:
        is_closed: Whether its writer was done when it was opened; if not, more rows may come.

    Raises:
        PathNotFoundError: If no dataset is there, or none that is complete.
        LayoutError: If its ``meta.json`` is malformed or its columns differ in length.
        FileTooShortError: If a file has fewer rows than it should.
    """

    def __init__(self, directory: Filename, mode: str = "r") -> None:
        reference.parse_mode(mode)
        place = os.fsdecode(os.fspath(directory))
        # Of a URL, each file is looked up by itself: a remote one is copied here first.
        is_url = creation.is_url(place)
        place = place.removesuffix("/") if is_url else creation.absolute_path(place)
        schema = _read_schema(place)
        columns = {
            name: MemoryMappedTensor.from_filename(
                formats.local_copy(treedir.leaf_path(place, name)),
                column.dtype,
                (schema.rows, *column.row_shape),
                mode=mode,
            )
            for name, column in schema.columns.items()
        }
        self._set(columns, Order(schema.rows), ())
        self.is_closed = schema.is_closed

    @classmethod
    def of(cls, columns: Mapping[str, torch.Tensor]) -> Self:
        """Makes a dataset of tensors that are mapped already, such as those of `mmrpc.open`.

        Args:
            columns: Tensors with the same number of rows. Nothing is copied.

        Raises:
            LayoutError: If their lengths differ.
            NotSharedError: If one is in no file or shared memory.
        """
        rows = rows_of(columns)
        for tensor in columns.values():
            reference.ref(tensor)
        return cls._make(dict(columns), Order(rows), ())

    @classmethod
    def from_batches(
        cls,
        directory: Filename,
        batches: Iterable[Mapping[str, torch.Tensor]],
        *,
        existsok: bool = False,
        progress: bool = False,
        total_rows: int | None = None,
    ) -> Self:
        """Writes what an iterable gives; no more than one batch is in memory.

        Args:
            directory: The dataset's; made if it is missing, but not its parents.
            batches: Each with the same columns, and any number of rows.
            existsok: Whether a dataset that is there is replaced. Who mapped it keeps its rows.
            progress: Whether a progress bar is shown on standard error.
            total_rows: How many rows to expect, for the progress bar.

        Raises:
            LayoutError: If a batch has other columns than the first.
            PathExistsError: If a dataset is there, and `existsok` is false.
            NoSpaceError: If there is too little space; nothing is left behind.
        """
        from mmrpc.data import making

        making.write_batches(
            directory, batches, existsok=existsok, progress=progress, total_rows=total_rows
        )
        return cls(directory)

    @classmethod
    def from_tensors(
        cls,
        directory: Filename,
        columns: Mapping[str, torch.Tensor],
        *,
        existsok: bool = False,
        progress: bool = False,
    ) -> Self:
        """Writes whole columns; see `from_batches`.

        Args:
            directory: The dataset's.
            columns: Tensors with the same number of rows, from any device, mapped ones too.
            existsok: Whether a dataset that is there is replaced.
            progress: Whether a progress bar is shown.
        """
        from mmrpc.data import making

        rows = rows_of(columns)
        batches = making.batches_of(columns)
        return cls.from_batches(
            directory, batches, existsok=existsok, progress=progress, total_rows=rows
        )

    @classmethod
    def from_files(
        cls,
        directory: Filename,
        files: Filename | Mapping[str, Filename],
        *,
        existsok: bool = False,
        progress: bool = False,
    ) -> Self:
        """Copies columns from files of any size; see `from_batches`.

        To use them where they are, pass their tensors to `of`.

        Args:
            directory: The dataset's.
            files: A ``.safetensors`` file, each tensor of which is a column; or for each column a
                file of one tensor, such as a ``.npy``, or one with a tensor of that name.
            existsok: Whether a dataset that is there is replaced.
            progress: Whether a progress bar is shown.
        """
        from mmrpc.data import making

        columns = making.columns_of(files)
        return cls.from_tensors(directory, columns, existsok=existsok, progress=progress)

    @classmethod
    def _make(
        cls, columns: dict[str, torch.Tensor], order: Order, transforms: tuple[Transform, ...]
    ) -> Self:
        made = cls.__new__(cls)
        made._set(columns, order, transforms)
        made.is_closed = True
        return made

    def _set(
        self, columns: Mapping[str, torch.Tensor], order: Order, transforms: tuple[Transform, ...]
    ) -> None:
        # Plain tensors on the mapped storages: twice as fast to index, and they travel as well.
        self._columns = {name: column.as_subclass(torch.Tensor) for name, column in columns.items()}
        self._order = order
        self._transforms = transforms
        self._is_plain = not order.steps and not transforms

    @property
    def nbytes(self) -> int:
        """Bytes of all rows of all columns, shown or not."""
        return sum(column.nbytes for column in self._columns.values())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            if self._is_plain:
                return {name: column[index] for name, column in self._columns.items()}
            return self._row(index)
        kind = type(index)
        if kind is list or (kind is torch.Tensor and index.dim()):
            return self._transformed(*self._gathered(index))
        if isinstance(index, str):
            return self.column(index)
        if isinstance(index, slice):
            return self._slice(index)
        if isinstance(index, tuple):
            raise LayoutError("a dataset has rows only: index the columns of what it gives")
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self._row(index.__index__())
        return self._transformed(*self._gathered(index))

    def __getitems__(self, rows: Sequence[int]) -> Sequence[Any]:
        """The rows of a batch, as a `DataLoader` asks for them; read with one gather."""
        batch, length = self._gathered(rows)
        for done, transform in enumerate(self._transforms):
            if not transform.is_batched:
                return [self._apply(row, done) for row in Rows(batch, length)]
            batch = transform.batch(batch, length)
        return Rows(batch, length)

    def __iter__(self) -> Iterator[Any]:
        return (self._row(i) for i in range(len(self)))

    def column(self, name: str) -> MemoryMappedTensor:
        """One column, without transforms; a view of its file if the rows are in their order.

        Raises:
            LayoutError: If there is no such column.
        """
        try:
            column = self._columns[name]
        except KeyError:
            raise LayoutError(f"there is no column {name!r}, only {self.columns}") from None
        span = self._order.span
        if span is None:
            return MemoryMappedTensor.from_tensor(column.index_select(0, self._order.index))
        return wrap(MemoryMappedTensor, column[slice(*span)])

    def _row(self, i: int) -> Any:
        at = self._order.row(i)
        return self._apply({name: column[at] for name, column in self._columns.items()})

    def _apply(self, row: Any, done: int = 0) -> Any:
        for transform in self._transforms[done:]:
            row = transform.row(row)
        return row

    def _slice(self, rows: slice) -> Batch:
        start, stop, step = rows.indices(len(self))
        if step < 0:
            raise LayoutError("a slice of a dataset goes forward", hint="Use ds[list] to reorder.")
        length = len(range(start, stop, step))
        order = self._order.then(Range(start, max(start, stop), step))
        span = order.span
        if span is None:
            batch = self._taken(self._order.index[rows])
        else:
            batch = {name: column[slice(*span)] for name, column in self._columns.items()}
        return self._transformed(batch, length)

    def _gathered(self, rows: Any) -> tuple[Batch, int]:
        order = self._order
        index = order.list_of(rows)
        try:
            batch = self._taken(order.place(index))
        except (IndexError, RuntimeError):
            # Torch checks each number while it gathers. Checking before would take as long as
            # the gather itself; here it is either a negative number, or our own error.
            batch = self._taken(order.place(order.check(index)))
        return batch, len(index)

    def _taken(self, index: torch.Tensor) -> Batch:
        # 20 times faster than column[index] for rows of a few KiB.
        return {name: column.index_select(0, index) for name, column in self._columns.items()}

    def _transformed(self, batch: Batch, length: int) -> Batch:
        if not self._transforms:
            return batch
        if not length and not all(transform.is_batched for transform in self._transforms):
            return {}  # what a function makes of rows is unknown without a row
        for transform in self._transforms:
            batch = transform.batch(batch, length)
        return batch

    def _with(
        self, columns: dict[str, torch.Tensor], order: Order, transforms: tuple[Transform, ...]
    ) -> Self:
        other = self._make(columns, order, transforms)
        other.is_closed = self.is_closed
        return other

    def advise(self, advice: str) -> None:
        """Tells the kernel how the columns will be read: see `MemoryMappedTensor.advise`.

        ``"random"`` makes cold random rows 10 times faster, ``"sequential"`` reads ahead more.
        """
        for column in self._columns.values():
            upkeep.advise(column, advice)

    def prefetch(self, rows: slice | Sequence[int] = slice(None)) -> None:
        """Starts to read rows from disk into memory, and returns at once.

        Args:
            rows: Which; all by default.
        """
        span = self._order.span
        if isinstance(rows, slice) and span is not None:
            shown = range(*span)[rows]
            if shown:
                low, high = min(shown[0], shown[-1]), max(shown[0], shown[-1])
                self._will_need(low, high + 1)
            return
        if isinstance(rows, slice):
            rows = range(*rows.indices(len(self)))
        order = self._order
        for at in order.place(order.check(order.list_of(rows))).tolist():
            self._will_need(at, at + 1)

    def _will_need(self, start: int, stop: int) -> None:
        for column in self._columns.values():
            upkeep.advise(column[start:stop], "willneed")

    def check(self) -> None:
        """Checks that all files are still there, whole and the same.

        Raises:
            PathError: The subclass that fits.
        """
        for column in self._columns.values():
            upkeep.check(column)

    def share(self, *, fallback: bool = False) -> SharedDataset:
        """Wraps the dataset for an RPC argument with a policy for nodes that cannot open it.

        Without a policy, sending the dataset itself is enough: it opens there, or raises.

        Args:
            fallback: Whether such a node gets the rows through RPC from this worker instead, which
                is slow, and which it is told by a warning.
        """
        from mmrpc.data.sharing import SharedDataset

        return SharedDataset(self, fallback=fallback)

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{name}: {str(column.dtype).removeprefix('torch.')}{list(column.shape[1:])}"
            for name, column in self._columns.items()
        )
        return f"{type(self).__name__}({len(self):,} rows; {columns})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        packed = {
            name: reference.pack(reference.ref(column)) for name, column in self._columns.items()
        }
        form = (packed, self._order.rows, self._order.steps, self._transforms, self.is_closed)
        return _open, (type(self), form)


def _read_schema(place: str) -> Schema:
    path = f"{place}/{treemeta.META}"
    try:
        return Schema.read(formats.local_copy(path))
    except PathNotFoundError as error:
        if error.path == place:
            raise
        # What looks up URLs speaks of the one file that it was asked for.
        raise PathNotFoundError(
            "no complete dataset is there",
            path=place,
            mount=error.mount,
            node=error.node,
            hint=error.hint,
        ) from None


def _open(cls: type[MappedDataset], form: tuple[Any, ...]) -> Any:
    """What a pickled dataset names; must stay importable under this name."""
    packed, rows, steps, transforms, is_closed = form
    try:
        columns = {name: reference.unpack(*ref).open_plain() for name, ref in packed.items()}
        dataset = cls._make(columns, Order(rows, steps), transforms)
    except Exception as error:
        if not unpickling_for_rpc():
            raise
        return Unopened(_open, (cls, form), error)
    dataset.is_closed = is_closed
    return dataset
