"""The file of one column while it is written: rows go behind, or into a reserved range.

Bytes that a ``meta.json`` has announced are never touched again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from mmrpc.core import creation, files
from mmrpc.core.trees import directory as treedir
from mmrpc.errors import MmrpcError, NoSpaceError

if TYPE_CHECKING:
    import torch

    from mmrpc.data.schema import Column

_RESERVE_FROM_BYTES: Final = 1 << 20  # below, the write itself reports a full disk as quickly


class ColumnFile:
    """An open column file.

    Args:
        directory: The dataset's.
        name: The column's.
        column: What its rows are.
        create: Whether the file is new; if not, it must exist.
    """

    def __init__(self, directory: str, name: str, column: Column, *, create: bool) -> None:
        self.path = treedir.leaf_path(directory, name)
        self.row_bytes = column.row_bytes
        if create:
            self.fd = _create(self.path)
        else:
            self.fd = files.open_regular(self.path, writable=True)

    def write(self, row: int, rows: torch.Tensor) -> None:
        """Writes rows from a given one on.

        Raises:
            NoSpaceError: If there is too little space.
        """
        start = row * self.row_bytes
        nbytes = len(rows) * self.row_bytes
        if nbytes >= _RESERVE_FROM_BYTES:
            self.reserve(start, nbytes)
        try:
            for piece in creation.pieces_of([rows]):
                part = piece
                while part:
                    written = os.pwrite(self.fd, part, start)
                    start += written
                    part = part[written:]
        except OSError as error:
            raise self._typed(error, nbytes) from None

    def reserve(self, start: int, nbytes: int) -> None:
        """Makes the file so long, with its space reserved.

        Raises:
            NoSpaceError: If there is too little.
        """
        if not nbytes:
            return
        try:
            os.posix_fallocate(self.fd, start, nbytes)
        except OSError as error:
            raise self._typed(error, nbytes) from None
        except OverflowError:
            raise NoSpaceError(
                "no file can be so long", path=self.path, needed_bytes=nbytes
            ) from None

    def _typed(self, error: OSError, nbytes: int) -> MmrpcError:
        typed = files.path_error(error, self.path, writing=True)
        if isinstance(typed, NoSpaceError):
            typed.needed_bytes = nbytes
        return typed

    def cut(self, rows: int) -> None:
        """Drops what is behind the given row; nobody was told of it."""
        if os.fstat(self.fd).st_size > rows * self.row_bytes:
            os.ftruncate(self.fd, rows * self.row_bytes)

    def sync(self) -> None:
        """Puts what was written on the device."""
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise files.path_error(error, self.path, writing=True) from None

    def close(self) -> None:
        """Closes the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        """Removes the file, which no ``meta.json`` has announced."""
        unlink(self.path)


def unlink(path: str) -> None:
    """Removes a file if it is there.

    Raises:
        PathError: If it cannot be removed, such as a directory.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise files.path_error(error, path, writing=True) from None


def _create(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise files.path_error(error, path, writing=True) from None
