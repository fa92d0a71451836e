"""Anonymous shared memory: many tensors in a few memory files, reachable by reference.

A tensor without a file lives in a piece of a memfd. Other processes of the host reach it as
``/proc/<pid>/fd/<n>`` of its owner, with the rights of the same user; nothing has a name that
could be left behind, and the kernel frees the memory with the last process that maps it,
killed ones included.

Small tensors share an arena, since a descriptor per tensor would exhaust ``ulimit -n``. A piece
whose tensor died is given back to the system at once, unless a reference to it was ever made
or the process forked: others may have it then, and it stays as it is while its arena lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Final
from weakref import WeakSet, WeakValueDictionary

from mmrpc.core import files, lease
from mmrpc.core.location import MemoryLocation, Mode
from mmrpc.core.mapping import PAGE_BYTES, Mapping, Pages
from mmrpc.core.system import host, libc
from mmrpc.core.system.meminfo import available_bytes
from mmrpc.errors import (
    FileTooShortError,
    NoSpaceError,
    PathNotReadableError,
    StaleReferenceError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

_ARENA_BYTES: Final = 64 << 20  # address space only, until used
_OWN_ARENA_FROM_BYTES: Final = 8 << 20
# A tensor has a descriptor of its own only if it is at least this part of all: so their number
# stays in the hundreds however many tensors there are.
_OWN_ARENA_SHARE: Final = 1 / 128
_CHECK_FROM_BYTES: Final = 1 << 20
_ALIGN_BYTES: Final = 64
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena(Mapping):
    """A memory file of this process, mapped whole.

    Attributes:
        fd: Its descriptor; other processes open it by this number.
        inode: Of the memory file.
        used_bytes: Everything behind is fresh, that is, zeros.
        pieces: How many pieces are in use.
        has_exports: Whether a reference to any piece was made.
        is_leased: Whether it waits for receivers.
        is_forked: Whether another process has all of it.
    """

    __slots__ = (
        "fd",
        "has_exports",
        "inode",
        "is_forked",
        "is_leased",
        "pieces",
        "used_bytes",
    )

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create(lease.memory_name(), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # Nobody who opens it can shrink it under us, which would be a SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self.inode = os.fstat(fd).st_ino
            address = libc.mmap(fd, nbytes, shared=True)
        except BaseException:
            os.close(fd)
            raise
        pages = Pages(address, nbytes, fd)
        super().__init__(address, nbytes, mode=Mode.WRITE, path=None, owner=pages)
        self.fd = fd
        self.used_bytes = 0
        self.pieces = 0
        self.has_exports = False
        self.is_leased = False
        self.is_forked = False

    def where(self) -> MemoryLocation:
        """Where others find it; it waits for them if the tensor goes before."""
        self.has_exports = self.is_leased = True
        lease.grant(self)
        return MemoryLocation(
            host.memory_host_id(), os.getpid(), host.own_start_time(), self.fd, self.inode
        )

    def unleased(self) -> None:
        """Called when nobody is expected to open it any more."""
        self.is_leased = False
        with _lock:
            _retire_if_unused(self)
        _collect()

    def punch(self, start: int, end: int) -> None:
        """Gives the whole pages of a range back; they are zeros afterwards."""
        first = -(-start // PAGE_BYTES) * PAGE_BYTES
        last = end // PAGE_BYTES * PAGE_BYTES
        if last > first:
            libc.punch_hole(self.fd, first, last - first)


class Piece(Mapping):
    """The part of an arena that one tensor has."""

    __slots__ = ("arena", "is_exported")

    def __init__(self, arena: Arena, start_bytes: int, nbytes: int) -> None:
        super().__init__(
            arena.address + start_bytes,
            nbytes,
            mode=Mode.WRITE,
            path=None,
            owner=arena,
            start_bytes=start_bytes,
        )
        self.arena = arena
        self.is_exported = False

    def where(self) -> MemoryLocation:
        """Where others find the arena; the piece stays as it is from now on."""
        self.is_exported = True
        return self.arena.where()

    def __del__(self) -> None:
        # This may run inside any allocation, also one that holds the lock: only note it there.
        _released.append((self.arena, self.start_bytes, self.nbytes, self.is_exported))
        _collect()


class ForeignMemory(Mapping):
    """A memory file of another process, mapped whole; its descriptor is closed again."""

    __slots__ = ("bell", "origin")

    def __init__(
        self, address: int, nbytes: int, origin: MemoryLocation, bell: lease.Bell | None
    ) -> None:
        pages = Pages(address, nbytes)
        super().__init__(address, nbytes, mode=Mode.WRITE, path=None, owner=pages)
        self.origin = origin
        self.bell = bell

    def where(self) -> MemoryLocation:
        """Where it came from."""
        return self.origin


AnonymousMapping = Arena | Piece | ForeignMemory

_lock = threading.Lock()
_released: deque[tuple[Arena, int, int, bool]] = deque()
_arenas: WeakSet[Arena] = WeakSet()
_current: Arena | None = None
_live_bytes = 0
_foreign: WeakValueDictionary[tuple[int, int, int], ForeignMemory] = WeakValueDictionary()


def allocate(nbytes: int, pieces: Iterable[memoryview] | None = None) -> Piece:
    """Makes anonymous shared memory.

    Args:
        nbytes: How much.
        pieces: Its content; None for zeros.

    Raises:
        NoSpaceError: If there is less memory; nothing is left behind.
    """
    if nbytes >= _CHECK_FROM_BYTES:
        free = available_bytes()
        if free is not None and nbytes > free and lease.end_all():
            free = available_bytes()
        if free is not None and nbytes > free:
            raise _no_space(nbytes, free)
    try:
        piece = _take(nbytes)
        if pieces is None:
            if nbytes:
                libc.fallocate(piece.arena.fd, piece.start_bytes, nbytes)
        else:
            _fill(piece, pieces)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise _no_space(nbytes, available_bytes()) from None
        raise files.path_error(error, "anonymous memory", writing=True) from None
    return piece


def _no_space(nbytes: int, free: int | None) -> NoSpaceError:
    have = "" if free is None else f" and {free:,} are available"
    return NoSpaceError(
        f"{nbytes:,} bytes are needed{have}",
        path="anonymous memory",
        hint="Give a filename, so that the data can be larger than RAM.",
        needed_bytes=nbytes,
        free_bytes=free,
    )


def _take(nbytes: int) -> Piece:
    global _current, _live_bytes
    with _lock:
        if nbytes >= max(_OWN_ARENA_FROM_BYTES, int(_live_bytes * _OWN_ARENA_SHARE)):
            arena, start = Arena(nbytes), 0
            _arenas.add(arena)
        else:
            arena, start = _room_in_current(nbytes)
        arena.used_bytes = start + nbytes
        arena.pieces += 1
        _live_bytes += nbytes
        piece = Piece(arena, start, nbytes)
    _collect()
    return piece


def _room_in_current(nbytes: int) -> tuple[Arena, int]:
    global _current
    # Whole pages for what has some, so that they can be given back.
    align = PAGE_BYTES if nbytes >= PAGE_BYTES else _ALIGN_BYTES
    if _current is not None:
        start = -(-_current.used_bytes // align) * align
        if start + nbytes <= _current.nbytes:
            return _current, start
    _current = Arena(max(_ARENA_BYTES, int(_live_bytes * _OWN_ARENA_SHARE) * 4))
    _arenas.add(_current)
    return _current, 0


def _fill(piece: Piece, pieces: Iterable[memoryview]) -> None:
    offset = piece.start_bytes
    for data in pieces:
        while data:
            written = os.pwrite(piece.arena.fd, data, offset)
            offset += written
            data = data[written:]


def _collect() -> None:
    """Takes back what was released, unless another holder of the lock will."""
    while _released and _lock.acquire(blocking=False):
        try:
            while _released:
                _give_back(*_released.popleft())
        finally:
            _lock.release()


def _give_back(arena: Arena, start: int, nbytes: int, is_exported: bool) -> None:
    global _live_bytes
    arena.pieces -= 1
    _live_bytes -= nbytes
    if not is_exported and not arena.is_forked:
        arena.punch(start, start + nbytes)
    _retire_if_unused(arena)


def _retire_if_unused(arena: Arena) -> None:
    global _current
    if arena.pieces or arena is not _current or arena.is_leased:
        return
    if arena.has_exports or arena.is_forked:
        _current = None  # the memory goes with the last process that maps it
    else:
        arena.punch(0, arena.nbytes)
        arena.used_bytes = 0


def attach(location: MemoryLocation, needed_bytes: int, *, node: str | None = None) -> Mapping:
    """Maps the anonymous memory of another process of this host, or finds our own.

    Raises:
        StaleReferenceError: If its owner has ended, or freed it.
        PathNotReadableError: If its owner is another user.
    """
    mapping = _known(location) or _open(location, node)
    if mapping.nbytes < needed_bytes:
        raise FileTooShortError(
            f"it has {mapping.nbytes:,} bytes and the tensor needs {needed_bytes:,}",
            path=_describe(location),
            node=node,
            needed_bytes=needed_bytes,
            actual_bytes=mapping.nbytes,
        )
    return mapping


def _known(location: MemoryLocation) -> Mapping | None:
    if (location.pid, location.started) == (os.getpid(), host.own_start_time()):
        for arena in list(_arenas):
            if arena.inode == location.inode and arena.fd == location.fd:
                lease.note_opened(arena.inode)
                return arena
        return None
    foreign = _foreign.get((location.pid, location.started, location.inode))
    if foreign is not None and foreign.bell is not None:
        foreign.bell.ring(location.inode)
    return foreign


def _describe(location: MemoryLocation) -> str:
    return f"anonymous memory {location.fd} of process {location.pid}"


def _open(location: MemoryLocation, node: str | None) -> ForeignMemory:
    path = f"/proc/{location.pid}/fd/{location.fd}"

    def stale(reason: str) -> StaleReferenceError:
        return StaleReferenceError(
            reason,
            path=_describe(location),
            node=node,
            hint="Anonymous memory can be opened while its owner keeps it; use a file to keep it.",
        )

    if not host.is_alive(location.pid, location.started):
        raise stale("the process that owns it has ended")
    try:
        link = os.readlink(path)
        if not lease.is_memory(link):
            raise stale("its owner has freed it")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise stale("its owner has freed it") from None
    except PermissionError:
        raise PathNotReadableError(
            f"it belongs to another user's process, and this is uid {os.geteuid()}",
            path=_describe(location),
            node=node,
            hint="Share a file that both may read.",
        ) from None
    except OSError as error:
        raise files.path_error(error, _describe(location), node=node) from None
    try:
        status = os.fstat(fd)
        if status.st_ino != location.inode:
            raise stale("its owner has freed it")
        address = libc.mmap(fd, status.st_size, shared=True)
    finally:
        os.close(fd)
    bell = lease.bell_of(location.pid, link)
    if bell is not None:
        bell.ring(location.inode)
    mapping = ForeignMemory(address, status.st_size, location, bell)
    key = (location.pid, location.started, location.inode)
    return _foreign.setdefault(key, mapping)


def _before_fork() -> None:
    # The child has all of it as well, and may keep or pass on what we would give back.
    for arena in list(_arenas):
        arena.is_forked = True


def _in_child() -> None:
    global _lock, _current, _live_bytes
    _lock = threading.Lock()
    _released.clear()
    _current = None  # the parent goes on allocating there
    _live_bytes = 0


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
