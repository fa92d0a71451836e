"""How long exported memory waits for its receivers.

A reference may arrive after the tensor that it was made from is gone: the result of a call, or
what was put into a queue. So memory is kept, from when a reference to it is made, until it was
opened as often as references to it were made, at most for `LEASE_S` after the last one.

A receiver tells the owner by a few bytes in a pipe of the owner's, which it finds as it finds
the memory: the name of the memory file says which descriptor it is.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import re
import select
import stat
import struct
import threading
import time
from typing import Final, Protocol
from weakref import WeakValueDictionary

LEASE_S: Final = 60.0

_NAME = re.compile(r"/memfd:mmrpc-(?P<fd>\d+)-(?P<inode>\d+)\b")
_OPENED: Final = struct.Struct("=Q")  # inode of the memory file
_READ_BYTES: Final = 4096


class Memory(Protocol):
    """A memory file that can be kept."""

    inode: int

    def unleased(self) -> None:
        """Called when it need not be kept any longer."""


class _Lease:
    __slots__ = ("memory", "unopened", "until_s")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.unopened = 0
        self.until_s = 0.0


_lock = threading.Lock()
_leases: dict[int, _Lease] = {}
_pipe: tuple[int, int] | None = None
_is_watched = False


def memory_name() -> str:
    """The name for a memory file of this process, by which receivers find the pipe."""
    bell = _get_pipe()[1]
    return f"mmrpc-{bell}-{os.fstat(bell).st_ino}"


def _get_pipe() -> tuple[int, int]:
    global _pipe
    with _lock:
        if _pipe is None:
            _pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return _pipe


def is_memory(link: str) -> bool:
    """Whether a link in ``/proc/<pid>/fd`` leads to a memory file of ours."""
    return _NAME.match(link) is not None


def grant(memory: Memory) -> None:
    """Keeps memory for one more receiver."""
    global _is_watched
    bell = _get_pipe()[0]
    if not _is_watched:
        _hear(bell)  # what was said until now is about leases that have ended
    with _lock:
        lease = _leases.get(memory.inode)
        if lease is None:
            lease = _leases[memory.inode] = _Lease(memory)
        lease.unopened += 1
        lease.until_s = time.monotonic() + LEASE_S
        is_watched, _is_watched = _is_watched, True
    if not is_watched:
        _thread.start_new_thread(_watch, (bell,))


def note_opened(inode: int) -> None:
    """Notes that a reference to memory of ours was opened."""
    with _lock:
        lease = _leases.get(inode)
        if lease is None:
            return
        lease.unopened -= 1
        if lease.unopened > 0:
            return
        del _leases[inode]
    lease.memory.unleased()


class _Descriptor:
    """Closed when it goes; see `mmrpc.core.mapping.Pages` for why it is an object of its own."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Bell:
    """The pipe of a process that owns memory, by which it hears that a reference was opened."""

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = _Descriptor(fd)

    def ring(self, inode: int) -> None:
        """Tells the owner; if it cannot hear, the lease ends with time."""
        with contextlib.suppress(OSError):
            os.write(self._fd.number, _OPENED.pack(inode))


_bells: WeakValueDictionary[tuple[int, str], Bell] = WeakValueDictionary()


def bell_of(owner: int, link: str) -> Bell | None:
    """Finds the bell of the owner of memory, one for all of its memory; None if it has none.

    Args:
        owner: PID of the owner.
        link: Where its descriptor of the memory leads to, in ``/proc``.
    """
    match = _NAME.match(link)
    if match is None:
        return None
    key = owner, match[0]
    bell = _bells.get(key)
    if bell is not None:
        return bell
    path = f"/proc/{owner}/fd/{match['fd']}"
    try:
        status = os.stat(path)
        # After a fork the number may be that of another file.
        if not stat.S_ISFIFO(status.st_mode) or status.st_ino != int(match["inode"]):
            return None
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    return _bells.setdefault(key, Bell(fd))


def end_all() -> bool:
    """Lets go of all that waits, when memory is short; gives whether there was any."""
    with _lock:
        ended = list(_leases.values())
        _leases.clear()
    for lease in ended:
        lease.memory.unleased()
    return bool(ended)


def _watch(bell: int) -> None:
    """Ends leases, on a thread that runs as long as there are any."""
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    while (wait_s := _end_old()) is not None:
        if poll.poll(wait_s * 1000 + 1):
            _hear(bell)


def _end_old() -> float | None:
    """Ends the leases whose time is over; gives the seconds until the next, or None."""
    global _is_watched
    ended = []
    with _lock:
        now = time.monotonic()
        for inode, lease in list(_leases.items()):
            if lease.until_s <= now:
                ended.append(_leases.pop(inode).memory)
        wait_s = min((lease.until_s - now for lease in _leases.values()), default=None)
        _is_watched = wait_s is not None
    for memory in ended:
        memory.unleased()
    return wait_s


def _hear(bell: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            for (inode,) in _OPENED.iter_unpack(os.read(bell, _READ_BYTES)):
                note_opened(inode)


def _in_child() -> None:
    global _lock, _pipe, _is_watched
    _lock = threading.Lock()
    _leases.clear()
    if _pipe is not None:
        # What is written there is for the parent; a pipe of our own comes with our next memory.
        for fd in _pipe:
            os.close(fd)
    _pipe, _is_watched = None, False


os.register_at_fork(after_in_child=_in_child)
