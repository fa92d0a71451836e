"""Many tensors in one file or one piece of shared memory, and the `Tree` that names them.

Ten thousand tensors are one file to write, one mapping to open and one reference to send: the
table of what is where stands in the arena itself, and a receiver keeps those it has read.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from mmrpc.core import creation, reference
from mmrpc.core.layout import Layout, contiguous_strides
from mmrpc.core.standin import Unopened, unpickling_for_rpc
from mmrpc.core.storage import byte_view, mapped_storage, tensor_of
from mmrpc.core.tensor import MemoryMappedTensor, wrap
from mmrpc.core.trees import meta as treemeta
from mmrpc.core.trees.table import ALIGNMENT_BYTES, HEADER_BYTES, Header, Table, aligned, digest_of
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    from mmrpc.core.creation import Filename

_MAX_DEPTH: Final = 64
_JOIN_BELOW_BYTES: Final = 256 << 10  # smaller tensors are gathered, to be written at once
_CHUNK_BYTES: Final = 4 << 20
_KEPT_TABLES: Final = 16

_PADDING: Final = bytes(ALIGNMENT_BYTES)
_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, MemoryMappedTensor})


class Tree(Mapping[str, Any]):
    """A nested, read-only mapping of names to mapped tensors that are in one arena.

    A tensor is made when it is asked for; `to_dict` makes all. A tree, or a subtree, is pickled
    as one reference of constant size, whatever it holds. Writing to a tensor is possible, adding
    one is not.

    Attributes:
        arena: All bytes of the arena as a 1-D uint8 tensor: to flush, check and advise.
    """

    __slots__ = ("_flat", "_header", "_node", "_path", "_table", "arena")

    def __init__(
        self,
        arena: MemoryMappedTensor,
        header: Header,
        table: Table,
        path: tuple[str, ...] = (),
        flat: dict[torch.dtype, torch.Tensor] | None = None,
    ) -> None:
        self.arena = arena
        self._header = header
        self._table = table
        self._path = path
        self._flat = {} if flat is None else flat
        node: Any = table.tree
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise LayoutError(f"the arena has no subtree {'.'.join(map(str, path))!r}")
        self._node = node

    @property
    def filename(self) -> str:
        """Absolute path of the file.

        Raises:
            NotSharedError: If it is in anonymous memory.
        """
        return self.arena.filename

    def __getitem__(self, key: str) -> Any:
        return self._value(key, self._node[key])

    def _value(self, key: str, entry: Any) -> Any:
        if type(entry) is int:
            return self._tensor(entry)
        if isinstance(entry, dict):
            return Tree(self.arena, self._header, self._table, (*self._path, key), self._flat)
        if isinstance(entry, list) and len(entry) == 1:
            return entry[0]
        raise LayoutError(f"the arena's table is malformed at {key!r}")

    def _tensor(self, row: int) -> MemoryMappedTensor:
        table = self._table
        try:
            dtype, shape = table.dtypes[row], table.shapes[row]
            start = self._header.data_start + table.offsets[row]
            element, misaligned = divmod(start, dtype.itemsize)
            if type(shape) is not tuple or misaligned or row < 0:
                raise TypeError
            # Torch checks that it is inside the arena; 5 times faster than a storage for each.
            plain = self._elements(dtype).as_strided(shape, _strides(shape), element)
        except (TypeError, IndexError, RuntimeError, OverflowError):
            plain = self._unusual(row)
        plain.__class__ = MemoryMappedTensor
        return plain  # type: ignore[return-value]

    def _unusual(self, row: int) -> torch.Tensor:
        """A nested tensor, an empty one, or the error that says what is wrong with a row."""
        size_bytes = self.arena.numel()
        layout = self._table.layout(row, self._header.data_start, size_bytes)
        storage = mapped_storage(self.arena)
        if storage is None or storage._mapping is None:
            raise LayoutError("the arena is not mapped")
        return creation.view(
            storage._mapping, layout.moved(storage._start_bytes + layout.offset_bytes)
        )

    def _elements(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole arena, read as elements of a dtype."""
        flat = self._flat.get(dtype)
        if flat is None:
            storage = mapped_storage(self.arena)
            if storage is None or storage._mapping is None:
                raise LayoutError("the arena is not mapped")
            count = self.arena.numel() // dtype.itemsize
            layout = Layout.contiguous(dtype, (count,), storage._start_bytes)
            flat = self._flat[dtype] = tensor_of(storage._mapping, layout)
        return flat

    def __iter__(self) -> Iterator[str]:
        return iter(self._node)

    def __len__(self) -> int:
        return len(self._node)

    def __contains__(self, key: object) -> bool:
        return key in self._node

    def to_dict(self) -> dict[str, Any]:
        """All of it as nested dicts of mapped tensors."""
        tensor = self._tensor
        return {
            key: tensor(entry) if type(entry) is int else self._plain(key, entry)
            for key, entry in self._node.items()
        }

    def _plain(self, key: str, entry: Any) -> Any:
        value = self._value(key, entry)
        return value.to_dict() if isinstance(value, Tree) else value

    def __repr__(self) -> str:
        storage = mapped_storage(self.arena)
        where = storage._mapping.describe() if storage and storage._mapping else "no mapping"
        return f"Tree({len(self)} entries, {self.arena.numel():,} bytes in {where!r})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        packed = reference.pack(reference.ref(self.arena))
        return _load, (*packed, self._header.digest, self._path)

    def __copy__(self) -> Tree:
        return Tree(self.arena, self._header, self._table, self._path, self._flat)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Independent copies of all tensors, in nested dicts."""
        import copy

        return copy.deepcopy(self.to_dict(), memo)


class _Builder:
    """Lays the tensors of a tree out, one behind the other.

    Attributes:
        tree: The tree with a row's number in place of each tensor.
        end: Bytes of all, padded.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tensors: list[torch.Tensor] = []
        self._unusual: set[int] = set()  # rows whose bytes are not simply there to be copied
        self.tree = self._node(tree)
        self._nbytes = [tensor.nbytes for tensor in self._tensors]
        self._starts = list(itertools.accumulate(map(aligned, self._nbytes), initial=0))
        self.end = self._starts.pop()

    def _node(self, tree: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
        if depth > _MAX_DEPTH:
            raise LayoutError(f"the tree is more than {_MAX_DEPTH} levels deep; is it in itself?")
        node: dict[str, Any] = {}
        for key, value in tree.items():
            if not isinstance(key, str):
                raise LayoutError(f"a key must be a string, not {key!r}")
            if isinstance(value, torch.Tensor):
                node[key] = row = len(self._tensors)
                if not _is_dense(value):
                    value = creation.check_source(value)
                    self._unusual.add(row)
                self._tensors.append(value)
            elif isinstance(value, Mapping):
                node[key] = self._node(value, depth + 1)
            else:
                treemeta.check_value(value, key)
                node[key] = [value]
        return node

    def table(self) -> Table:
        """What is where."""
        dtypes = [tensor.dtype for tensor in self._tensors]
        shapes = [
            _nested_shape(tensor) if tensor.is_nested else tuple(tensor.shape)
            for tensor in self._tensors
        ]
        return Table(self.tree, dtypes, shapes, self._starts)

    def pieces(self, header: Header, table: bytes) -> Iterator[memoryview]:
        """The bytes of the arena in order, few and large."""
        front = header.pack() + table
        chunk = [front.ljust(header.data_start, b"\0")]
        chunk_bytes = len(chunk[0])
        for row, (tensor, nbytes) in enumerate(zip(self._tensors, self._nbytes, strict=True)):
            if nbytes > _JOIN_BELOW_BYTES:
                yield memoryview(b"".join(chunk))
                chunk, chunk_bytes = [], 0
                yield from _pieces(tensor)
            elif row in self._unusual:
                chunk += map(bytes, _pieces(tensor))
            else:
                chunk.append(ctypes.string_at(tensor.data_ptr(), nbytes))
            chunk.append(_PADDING[: -nbytes % len(_PADDING)])
            chunk_bytes += nbytes
            if chunk_bytes >= _CHUNK_BYTES:
                yield memoryview(b"".join(chunk))
                chunk, chunk_bytes = [], 0
        yield memoryview(b"".join(chunk))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it can be saved, and its memory holds just its elements in row-major order."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _nested_shape(tensor: torch.Tensor) -> dict[str, Any]:
    sizes = tensor._nested_tensor_size()
    return {"sizes": sizes.tolist(), "dims": sizes.shape[1] if sizes.numel() else 0}


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    _, dense = creation.layout_of_copy(tensor, None)
    return creation.pieces_of(dense)


def write(
    tree: Mapping[str, Any],
    filename: Filename | None,
    *,
    existsok: bool = False,
    durable: bool = False,
) -> Tree:
    """Writes the tensors of nested dicts into one new arena.

    Args:
        tree: Nested dicts of tensors, and of plain values that JSON can hold.
        filename: Its file, which the caller owns; None for anonymous shared memory.
        existsok: Whether a file of that name is replaced. Who mapped the old one keeps it.
        durable: Whether the file is on the device on return.

    Raises:
        LayoutError: If a value cannot be held.
        PathExistsError: If the name is taken and `existsok` is false.
        NoSpaceError: If there is too little space; nothing is left behind.
    """
    builder = _Builder(tree)
    table = builder.table()
    raw = table.dump()
    header = Header.of(raw)
    layout = Layout.contiguous(torch.uint8, (header.data_start + builder.end,))
    pieces = builder.pieces(header, raw)
    plain = creation.new(layout, pieces, filename=filename, existsok=existsok, durable=durable)
    _tables.keep(header.digest, table)
    return Tree(wrap(MemoryMappedTensor, plain), header, table)


def open_arena(arena: MemoryMappedTensor, where: str) -> Tree:
    """Reads the table of a mapped arena.

    Args:
        arena: All its bytes.
        where: What to call it in errors.

    Raises:
        LayoutError: If it is none, or malformed.
    """
    header = _header_of(arena, where)
    return Tree(arena, header, _table_of(arena, header, where))


def _header_of(arena: torch.Tensor, where: str) -> Header:
    if arena.numel() < HEADER_BYTES:
        raise LayoutError(f"{where} is no arena of tensors")
    return Header.unpack(bytes(byte_view(arena[:HEADER_BYTES])), arena.numel(), where)


def _table_of(arena: torch.Tensor, header: Header, where: str) -> Table:
    table = _tables.get(header.digest)
    if table is None:
        raw = bytes(byte_view(arena[HEADER_BYTES : HEADER_BYTES + header.table_bytes]))
        if digest_of(raw) != header.digest:
            raise LayoutError(f"{where} has a damaged table")
        table = Table.parse(raw, where)
        _tables.keep(header.digest, table)
    return table


# A tree has few shapes and many tensors.
_strides = functools.lru_cache(maxsize=1024)(contiguous_strides)


class _Tables:
    """The tables that this process read last, by their digests."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Table] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: bytes) -> Table | None:
        with self._lock:
            table = self._kept.get(digest)
            if table is not None:
                self._kept.move_to_end(digest)
            return table

    def keep(self, digest: bytes, table: Table) -> None:
        with self._lock:
            self._kept[digest] = table
            if len(self._kept) > _KEPT_TABLES:
                self._kept.popitem(last=False)


_tables = _Tables()


def _load(*packed: Any) -> Any:
    """What a pickled tree names; must stay importable under this name."""
    *location, digest, path = packed
    try:
        arena = reference.unpack(*location).open()
        header = _header_of(arena, "the arena")
        if header.digest != digest:
            raise LayoutError("the arena has another table than the sender's")
        return Tree(arena, header, _table_of(arena, header, "the arena"), path)
    except Exception as error:
        if not unpickling_for_rpc():
            raise
        return Unopened(_load, packed, error)


__all__ = ["Tree", "open_arena", "write"]
