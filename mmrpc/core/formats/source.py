"""A file of some format, opened once: one descriptor to read the header and to map the tensors."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from mmrpc.core import creation, files, mapping, reference
from mmrpc.core.identity import identify
from mmrpc.core.layout import Layout, alignment_bytes
from mmrpc.core.location import FileIdentity, Mode
from mmrpc.core.storage import tensor_of
from mmrpc.errors import FileTooShortError, LayoutError, StaleReferenceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mmrpc.core.mapping import FileMapping
    from mmrpc.core.tensor import MemoryMappedTensor


class Source:
    """An open file, whose header a format reads.

    Attributes:
        path: Its absolute path, without symbolic links.
        name: The name that the caller gave, which may be a link to it.
        size_bytes: Its size when it was opened.
        fd: Its descriptor.
        mode: How its tensors are mapped.
    """

    def __init__(self, path: str, name: str, fd: int, mode: Mode, *, copy_misaligned: bool) -> None:
        self.path = path
        self.name = name
        self.fd = fd
        self.mode = mode
        self._copy_misaligned = copy_misaligned
        status = os.fstat(fd)
        self.size_bytes = status.st_size
        self._identity = identify(fd, status)
        self._mapping: FileMapping | None = None

    def read(self, start: int, nbytes: int, what: str) -> bytes:
        """Reads a range that must be there.

        Args:
            start: First byte.
            nbytes: Length; the caller has bounded it.
            what: What stands there, for the error.

        Raises:
            FileTooShortError: If the file ends before.
        """
        self.check_end(start + nbytes, what)
        data = b""
        try:
            while len(data) < nbytes:
                part = os.pread(self.fd, nbytes - len(data), start + len(data))
                if not part:
                    raise self._too_short(start + nbytes, start + len(data), what)
                data += part
        except OSError as error:
            if isinstance(error, FileTooShortError):
                raise
            raise files.path_error(error, self.path) from None
        return data

    def check_end(self, end_bytes: int, what: str) -> None:
        """Checks that the file reaches so far.

        Raises:
            FileTooShortError: If it does not.
        """
        if end_bytes > self.size_bytes:
            raise self._too_short(end_bytes, self.size_bytes, what)

    def _too_short(self, needed: int, actual: int, what: str) -> FileTooShortError:
        return FileTooShortError(
            f"it has {actual:,} bytes, and {what} ends at {needed:,}",
            path=self.path,
            hint="Was it truncated, or is it still being written?",
            needed_bytes=needed,
            actual_bytes=actual,
        )

    def bad(self, reason: str, hint: str | None = None) -> LayoutError:
        """Makes the error for a malformed file."""
        return LayoutError(f"{self.path!r}: {reason}", hint=hint)

    def tensor(self, layout: Layout, what: str) -> MemoryMappedTensor:
        """Maps one tensor.

        Args:
            layout: Where it is in the file; checked here.
            what: Its name, for errors.

        Raises:
            LayoutError: If the numbers make no sense, or it is misaligned and not to be copied.
            FileTooShortError: If the file ends before it does.
        """
        from mmrpc.core.tensor import MemoryMappedTensor, wrap

        misaligned = layout.offset_bytes % alignment_bytes(layout.dtype)
        try:
            (layout.moved(0) if misaligned else layout).check()
        except LayoutError as error:
            raise self.bad(f"{what}: {error.reason}", error.hint) from None
        self.check_end(layout.end_bytes, what)
        if misaligned:
            return wrap(MemoryMappedTensor, self._copied(layout, what))
        return wrap(MemoryMappedTensor, tensor_of(self._mapped(), layout))

    def _copied(self, layout: Layout, what: str) -> Any:
        if not self._copy_misaligned:
            raise self.bad(
                f"{what} starts at byte {layout.offset_bytes}, which does not suit {layout.dtype}",
                "Pass copy_misaligned=True to have it copied into shared memory, or write the "
                "file again.",
            )
        span = Layout.contiguous(layout.dtype, (layout.span_bytes // layout.dtype.itemsize,))
        raw = self.read(layout.offset_bytes, layout.span_bytes, what)
        flat = creation.new(span, [memoryview(raw)], filename=None, existsok=False)
        return flat.as_strided(layout.shape, layout.strides)

    def _mapped(self) -> FileMapping:
        # All of the file, from the descriptor whose header was read: never another file that has
        # its name by now.
        if self._mapping is None:
            self._mapping = mapping.map_file(
                self.path, self.mode, self.size_bytes, opener=self._reopen, check=self._is_same
            )
        return self._mapping

    def _reopen(self, path: str, *, writable: bool, node: str | None) -> int:
        return os.dup(self.fd)

    def _is_same(self, found: FileIdentity, status: os.stat_result) -> None:
        if found != self._identity:
            raise StaleReferenceError(
                "another file took its name while it was being opened",
                path=self.path,
                hint="Open it again.",
            )


@contextlib.contextmanager
def open_source(path: str, mode: str, *, copy_misaligned: bool = False) -> Iterator[Source]:
    """Opens a file for a format to read; see `mmrpc.open` for the arguments."""
    wanted = reference.parse_mode(mode)
    name = creation.absolute_path(path)
    try:
        real = os.path.realpath(name)
    except ValueError:  # a NUL in it, of which opening tells
        real = name
    fd = files.open_regular(real, writable=wanted is Mode.WRITE)
    try:
        yield Source(real, name, fd, wanted, copy_misaligned=copy_misaligned)
    finally:
        os.close(fd)
