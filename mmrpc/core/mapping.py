"""Live mappings of files: one per file and mode in a process, shared by every tensor on it.

A mapping is made from the descriptor that was checked, never from a path, and keeps no
descriptor. While it lives its inode cannot be reused, so a path that still has its device and
inode is still its file: a second opening costs one `stat`.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from mmrpc.core import files
from mmrpc.core.identity import identify
from mmrpc.core.location import FileIdentity, Mode
from mmrpc.core.system import libc, pagemap
from mmrpc.errors import FileTooShortError, PathNotWritableError, StaleReferenceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmrpc.core.location import Location

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Pages:
    """Pages of memory that are unmapped when it goes, and a descriptor that is closed then.

    An object of its own: while `__del__` of an object runs, another thread can still get it out
    of a registry of weak references, and would have what is being unmapped.
    """

    __slots__ = ("_address", "_fd", "_nbytes")

    def __init__(self, address: int, nbytes: int, fd: int | None = None) -> None:
        self._address = address
        self._nbytes = nbytes
        self._fd = fd

    def __del__(self) -> None:
        # `libc` is None when the interpreter ends; the kernel unmaps then.
        if libc is not None:
            if self._address:
                libc.munmap(self._address, self._nbytes)
            if self._fd is not None:
                os.close(self._fd)


class Mapping:
    """Bytes that are mapped into this process, writable; unmapped when nothing views them.

    Attributes:
        address: Of the first byte; 0 if there are none.
        nbytes: Length.
        start_bytes: Where the first byte stands in the file or memory.
        mode: `Mode.WRITE` if writes are shared, `Mode.READ` if they stay in this process.
        path: Absolute path of the file; None for memory.
        owner: What keeps the bytes mapped, such as `Pages`.
        location: What a resolver found for it, to be found again; the resolver's to use.
        packed: What `mmrpc.core.reference` made of a location, likewise.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "location",
        "mode",
        "nbytes",
        "owner",
        "packed",
        "path",
        "start_bytes",
    )

    def __init__(
        self,
        address: int,
        nbytes: int,
        *,
        mode: Mode,
        path: str | None,
        owner: object,
        start_bytes: int = 0,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.mode = mode
        self.path = path
        self.owner = owner
        self.start_bytes = start_bytes
        self.location: Location | None = None
        self.packed: tuple[Location, tuple[Any, ...]] | None = None

    def describe(self) -> str:
        """Names what is mapped, for errors."""
        return self.path or "anonymous memory"

    def has_private_writes(self, start: int, nbytes: int) -> bool:
        """Whether a range holds what is in this process only, in no file."""
        if self.mode is Mode.WRITE or not nbytes:
            return False
        return pagemap.has_private_pages(*self.pages(start, nbytes))

    def pages(self, start: int, nbytes: int) -> tuple[int, int]:
        """The whole pages, as address and length, that hold a range of the mapping."""
        first = (self.address + start) // PAGE_BYTES * PAGE_BYTES
        return first, self.address + start + nbytes - first


class FileMapping(Mapping):
    """A mapped file.

    Attributes:
        identity: Which file it is.
    """

    __slots__ = ("identity",)
    path: str

    def __init__(
        self,
        address: int,
        nbytes: int,
        *,
        mode: Mode,
        path: str,
        identity: FileIdentity,
        owner: object,
        start_bytes: int = 0,
    ) -> None:
        super().__init__(
            address, nbytes, mode=mode, path=path, owner=owner, start_bytes=start_bytes
        )
        self.identity = identity

    def is_named(self, status: os.stat_result) -> bool:
        """Whether `status` is that of the mapped file."""
        identity = self.identity
        return status.st_ino == identity.inode and status.st_dev == identity.device

    def still_has(self, needed_bytes: int) -> bool:
        """Whether its name is still that of the file, and the file has that many bytes."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        # One that is empty maps nothing, and so holds no inode.
        return self.is_named(status) and status.st_size >= needed_bytes <= self.nbytes > 0


class Opener(Protocol):
    """Opens an existing file, as `mmrpc.core.files.open_existing` does."""

    def __call__(self, path: str, *, writable: bool, node: str | None) -> int:
        """Gives a descriptor, the caller's to close, or raises a `PathError`."""


_lock = threading.Lock()
_live: WeakValueDictionary[tuple[str, Mode], FileMapping] = WeakValueDictionary()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def map_file(
    path: str,
    mode: Mode,
    needed_bytes: int = 0,
    *,
    opener: Opener = files.open_existing,
    check: Callable[[FileIdentity, os.stat_result], None] | None = None,
    node: str | None = None,
) -> FileMapping:
    """Gives the mapping of an existing file, which is reused if it is mapped already.

    Args:
        path: Absolute path.
        mode: How to map it.
        needed_bytes: Bytes that it must at least have.
        opener: Opens the file where it is not mapped yet.
        check: Called with what the path is now, reused or not; raises if that will not do.
        node: Name of this node, for errors.

    Raises:
        PathError: The subclass that fits; nothing was created or changed.
    """
    mapping = _reuse(path, mode, needed_bytes, check, node)
    if mapping is not None:
        return mapping
    fd = opener(path, writable=mode is Mode.WRITE, node=node)
    try:
        status = os.fstat(fd)
        files.check_regular(status, path, node=node)
        identity = identify(fd, status)
        if check is not None:
            check(identity, status)
        _check_size(path, status.st_size, needed_bytes, node)
        mapping = map_descriptor(fd, status.st_size, mode, path, identity)
    finally:
        os.close(fd)
    return _remember(mapping)


def _reuse(
    path: str,
    mode: Mode,
    needed_bytes: int,
    check: Callable[[FileIdentity, os.stat_result], None] | None,
    node: str | None,
) -> FileMapping | None:
    mapping = _live.get((path, mode))
    if mapping is None or not mapping.nbytes:
        return None  # an empty one maps nothing, and so holds no inode
    try:
        status = os.stat(path)
    except OSError:
        return None  # opening says what is wrong
    if not mapping.is_named(status):
        return None
    if check is not None:
        check(mapping.identity, status)
    _check_size(path, status.st_size, needed_bytes, node)
    if needed_bytes > mapping.nbytes:
        return None  # the file has grown since
    if mapping.has_private_writes(0, mapping.nbytes):
        return None  # a new reader sees the file, not what somebody here wrote over it
    return mapping


def _check_size(path: str, size_bytes: int, needed_bytes: int, node: str | None) -> None:
    if size_bytes < needed_bytes:
        raise FileTooShortError(
            f"it has {size_bytes:,} bytes and the tensor needs {needed_bytes:,}",
            path=path,
            node=node,
            hint="Was it truncated, or is it still being written?",
            needed_bytes=needed_bytes,
            actual_bytes=size_bytes,
        )


def map_descriptor(
    fd: int, nbytes: int, mode: Mode, path: str, identity: FileIdentity
) -> FileMapping:
    """Maps a checked descriptor, which stays the caller's to close."""
    try:
        address = libc.mmap(fd, nbytes, shared=mode is Mode.WRITE) if nbytes else 0
    except OSError as error:
        raise files.path_error(error, path) from None
    pages = Pages(address, nbytes)
    return FileMapping(address, nbytes, mode=mode, path=path, identity=identity, owner=pages)


def adopt(mapping: FileMapping) -> FileMapping:
    """Makes the mapping of a file that was just created the one that is reused."""
    with _lock:
        _live[mapping.path, mapping.mode] = mapping
    return mapping


def _remember(mapping: FileMapping) -> FileMapping:
    """Like `adopt`, but gives what another thread mapped meanwhile, if it will do."""
    with _lock:
        other = _live.get((mapping.path, mapping.mode))
        if (
            other is not None
            and other.identity == mapping.identity
            and other.nbytes >= mapping.nbytes
            and not other.has_private_writes(0, other.nbytes)
        ):
            return other
        _live[mapping.path, mapping.mode] = mapping
        return mapping


def map_writable_or_private(
    path: str, needed_bytes: int, *, node: str | None = None
) -> FileMapping:
    """Maps a file shared if it may be written, and copy-on-write otherwise."""
    try:
        return map_file(path, Mode.WRITE, needed_bytes, node=node)
    except PathNotWritableError:
        return map_file(path, Mode.READ, needed_bytes, node=node)


def check_alive(mapping: FileMapping, end_bytes: int, *, node: str | None = None) -> None:
    """Checks that a mapped file is still there under its name, whole and the same.

    Raises:
        PathNotFoundError: If its name is gone.
        StaleReferenceError: If its name belongs to another file.
        FileTooShortError: If it was truncated below `end_bytes`: reading it is a SIGBUS.
    """
    path = mapping.path
    try:
        status = os.stat(path)
    except OSError as error:
        raise files.path_error(error, path, node=node) from None
    if not mapping.is_named(status):
        raise StaleReferenceError(
            "another file has its name now",
            path=path,
            node=node,
            hint="What is mapped here is the old file; open the path again for the new one.",
        )
    _check_size(path, status.st_size, end_bytes, node)
