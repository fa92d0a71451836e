"""The table of an arena file: which tensor is where. Bytes to plain values and back, no files.

64 bytes   magic, length of the table, start of the data, digest of the table
table      JSON, in columns: a row for each tensor
data       each tensor at a multiple of 64 bytes
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any, Final

import torch

from mmrpc.core.layout import DTYPES, Layout, dtype_name
from mmrpc.core.nested import NestedLayout
from mmrpc.errors import LayoutError

ALIGNMENT_BYTES: Final = 64
HEADER_BYTES: Final = 64
MAGIC: Final = b"mmrpctr1"

_HEADER: Final = struct.Struct("<8sQQ16s")
_MAX_TABLE_BYTES: Final = 1 << 30

AnyLayout = Layout | NestedLayout


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of an arena.

    Attributes:
        table_bytes: Length of the table, which follows the header.
        data_start: Where offsets in the table are counted from.
        digest: Of the table.
    """

    table_bytes: int
    data_start: int
    digest: bytes

    @classmethod
    def of(cls, table: bytes) -> Header:
        """The header that goes before a table."""
        return cls(len(table), aligned(HEADER_BYTES + len(table)), digest_of(table))

    def pack(self) -> bytes:
        """As bytes."""
        packed = _HEADER.pack(MAGIC, self.table_bytes, self.data_start, self.digest)
        return packed.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes, size_bytes: int, where: str) -> Header:
        """Reads what `pack` gave.

        Raises:
            LayoutError: If it is not that, or the arena is shorter than it says.
        """
        magic, table_bytes, data_start, digest = _HEADER.unpack(raw[: _HEADER.size])
        if magic != MAGIC:
            raise LayoutError(f"{where} is no arena of tensors")
        header = cls(table_bytes, data_start, digest)
        if (
            table_bytes > _MAX_TABLE_BYTES
            or data_start != aligned(HEADER_BYTES + table_bytes)
            or data_start > size_bytes
        ):
            raise LayoutError(f"{where} has a malformed header")
        return header


def digest_of(table: bytes) -> bytes:
    """What tells one table from another."""
    return hashlib.blake2b(table, digest_size=16).digest()


class Table:
    """Rows of tensors, and the tree that names them.

    Attributes:
        tree: Nested dicts; a leaf is the number of a row, or a list with one plain value.
        dtypes: Of each row.
        shapes: Of each row: sizes, or for a nested tensor a dict with a list of them.
        offsets: Of each row, in bytes from the start of the data.
    """

    __slots__ = ("dtypes", "offsets", "shapes", "tree")

    def __init__(
        self,
        tree: dict[str, Any],
        dtypes: list[torch.dtype],
        shapes: list[Any],
        offsets: list[int],
    ) -> None:
        self.tree = tree
        self.dtypes = dtypes
        self.shapes = shapes
        self.offsets = offsets

    def dump(self) -> bytes:
        """As JSON."""
        names = list(dict.fromkeys(self.dtypes))
        numbers = {dtype: number for number, dtype in enumerate(names)}
        columns = {
            "dtypes": [dtype_name(dtype) for dtype in names],
            "dtype": [numbers[dtype] for dtype in self.dtypes],
            "shape": self.shapes,
            "offset": self.offsets,
            "tree": self.tree,
        }
        return json.dumps(columns, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, raw: bytes, where: str) -> Table:
        """Reads what `dump` gave; each row is checked when its tensor is asked for.

        Raises:
            LayoutError: If it is not that.
        """
        try:
            columns = json.loads(raw)
            kinds = [DTYPES[name] for name in columns["dtypes"]]
            dtypes = [kinds[number] for number in columns["dtype"]]
            shapes, offsets, tree = columns["shape"], columns["offset"], columns["tree"]
            shapes = [tuple(shape) if isinstance(shape, list) else shape for shape in shapes]
            good = len(dtypes) == len(shapes) == len(offsets) and isinstance(tree, dict)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            good = False
        if not good:
            raise LayoutError(f"{where} has a malformed table")
        return cls(tree, dtypes, shapes, offsets)

    def layout(self, row: int, data_start: int, size_bytes: int) -> AnyLayout:
        """Where the tensor of a row is, in bytes from the start of the arena.

        Args:
            row: Its number.
            data_start: Start of the data.
            size_bytes: Size of the arena.

        Raises:
            LayoutError: If the row makes no sense, or reaches beyond the end.
        """
        try:
            if row < 0:
                raise IndexError("there is no such row")
            dtype, shape, offset = self.dtypes[row], self.shapes[row], self.offsets[row]
            layout: AnyLayout
            if isinstance(shape, dict):
                sizes = torch.tensor(shape["sizes"], dtype=torch.int64)
                sizes = sizes.reshape(len(shape["sizes"]), shape["dims"])
                layout = NestedLayout.contiguous(dtype, sizes, data_start + offset)
            else:
                layout = Layout.contiguous(dtype, tuple(shape), data_start + offset)
        except LayoutError:
            raise
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            raise LayoutError(f"row {row} of the arena's table is malformed: {error}") from None
        if offset < 0 or layout.end_bytes > size_bytes:
            raise LayoutError(
                f"row {row} of the arena's table ends at byte {layout.end_bytes:,}, and the arena "
                f"has {size_bytes:,}"
            )
        return layout
