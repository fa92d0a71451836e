"""Many named tensors in one mapped file or one piece of shared memory."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import torch

from mmrpc.core import files
from mmrpc.core.creation import absolute_path
from mmrpc.core.storage import byte_view
from mmrpc.core.tensor import MemoryMappedTensor
from mmrpc.errors import LayoutError
from mmrpc.train.table import Spec, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

_READ_ONLY = 0o444


class Arena:
    """Named tensors that are views of one run of mapped bytes.

    It pickles as a reference to those bytes; the receiver reads the names from them.

    Args:
        data: The bytes of the whole file, uint8.
        table: What is where in it; None to read it from the bytes.

    Attributes:
        data: See ``Args``.
        table: See ``Args``.
        tensors: The views by name, plain tensors.

    Raises:
        LayoutError: If the bytes are no whole arena.
    """

    def __init__(self, data: MemoryMappedTensor, table: Table | None = None) -> None:
        self.data = data
        self.table = table or Table.parse(byte_view(data))
        flat = data.detach()
        self.tensors = {
            name: flat[at.offset_bytes :][: at.span_bytes].view(at.dtype).view(at.shape)
            for name, at in self.table.layouts.items()
        }

    @classmethod
    def create(
        cls,
        specs: Mapping[str, Spec],
        *,
        filename: str | os.PathLike[str] | None,
        metadata: Mapping[str, str] | None = None,
        existsok: bool = False,
    ) -> Arena:
        """Makes an arena of zeros, its space reserved.

        Args:
            specs: The tensors by name.
            filename: The file, which the caller owns; None for anonymous shared memory.
            metadata: Further text to have in its header.
            existsok: Whether a file of that name is replaced.

        Raises:
            NoSpaceError: If there is too little space; nothing is left behind.
            PathError: If the file cannot be made.
        """
        table = Table.plan(specs, metadata)
        data = MemoryMappedTensor.zeros(
            table.nbytes, dtype=torch.uint8, filename=filename, existsok=existsok
        )
        data[: len(table.header)] = torch.frombuffer(bytearray(table.header), dtype=torch.uint8)
        return cls(data, table)

    @classmethod
    def open(cls, filename: str | os.PathLike[str], mode: str = "r") -> Arena:
        """Maps an existing arena.

        Args:
            filename: The file, which stays the caller's.
            mode: ``"r"`` or ``"r+"``, as for `MemoryMappedTensor.from_filename`.

        Raises:
            LayoutError: If it is no whole arena.
            PathError: If it cannot be read.
        """
        path = absolute_path(filename)
        fd = files.open_regular(path)
        try:
            nbytes = os.fstat(fd).st_size
        finally:
            os.close(fd)
        data = MemoryMappedTensor.from_filename(path, torch.uint8, (nbytes,), mode=mode)
        try:
            return cls(data)
        except LayoutError as error:
            raise LayoutError(f"{path!r} cannot be used: {error.reason}") from None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole arena, header included."""
        return self.table.nbytes

    def digest(self) -> str:
        """``sha256:...`` of the present values, their names and kinds."""
        digest = hashlib.sha256(Table.plan(self.table.specs()).header)
        digest.update(self._values)
        return f"sha256:{digest.hexdigest()}"

    def has_same_values(self, other: Arena) -> bool:
        """Whether names, kinds and bytes of the tensors are the same."""
        mine, theirs = (a.data.detach()[len(a.table.header) :] for a in (self, other))
        return self.table.specs() == other.table.specs() and torch.equal(mine, theirs)

    @property
    def _values(self) -> memoryview:
        return byte_view(self.data)[len(self.table.header) :]

    def write_copy(
        self, filename: str, metadata: Mapping[str, str], *, durable: bool, existsok: bool = False
    ) -> None:
        """Writes the present values to a new file, complete or absent, which nobody may write to.

        Args:
            filename: Absolute path.
            metadata: Further text to have in its header.
            durable: Whether it is on the device when this returns.
            existsok: Whether a file of that name is replaced.

        Raises:
            NoSpaceError: If there is too little space; nothing is left behind.
            PathError: If the file cannot be made.
        """
        table = Table.plan(self.table.specs(), metadata)
        pieces = [memoryview(table.header), self._values]
        with files.new_file(filename, replace=existsok) as file:
            files.write(file.fd, pieces, table.nbytes, filename)
            os.fchmod(file.fd, _READ_ONLY)
            file.publish(durable=durable)

    def __reduce__(self) -> tuple[type[Arena], tuple[MemoryMappedTensor]]:
        return Arena, (self.data,)
