"""How long exported memory waits for its receivers.

A reference may arrive after the tensor that it was made from is gone: the result of a call, or
what was put into a queue. So memory is kept, from when a reference to it is made, until as many
processes have opened it as references were made, at most for `LEASE_S` after the last one.

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
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mmrpc.core.mapping import Mapping

LEASE_S: Final = 60.0

_NAME = re.compile(r"/memfd:mmrpc-(?P<fd>\d+)-(?P<inode>\d+)\b")
_OPENED: Final = struct.Struct("=QQ")  # inode of the memory file, PID of the receiver
_READ_BYTES: Final = 4096


class _Lease:
    __slots__ = ("exports", "memory", "receivers", "until_s")

    def __init__(self, memory: Mapping) -> None:
        self.memory = memory
        self.exports = 0
        self.receivers: set[int] = set()
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


def grant(memory: Mapping, inode: int) -> None:
    """Keeps memory for one more receiver."""
    global _is_watched
    with _lock:
        lease = _leases.get(inode)
        if lease is None:
            lease = _leases[inode] = _Lease(memory)
        lease.exports += 1
        lease.until_s = time.monotonic() + LEASE_S
        is_watched, _is_watched = _is_watched, True
    if not is_watched:
        _thread.start_new_thread(_watch, (_get_pipe()[0],))


def note_opened(inode: int, pid: int) -> None:
    """Notes that a process has opened memory of ours."""
    with _lock:
        lease = _leases.get(inode)  # it outlives the lock, and so does its memory
        if lease is not None:
            lease.receivers.add(pid)
            if len(lease.receivers) >= lease.exports:
                del _leases[inode]


def tell_opened(owner: int, link: str, inode: int) -> None:
    """Tells the owner of memory that this process has opened it; if it cannot hear, it waits."""
    match = _NAME.match(link)
    if match is None:
        return
    path = f"/proc/{owner}/fd/{match['fd']}"
    with contextlib.suppress(OSError):
        status = os.stat(path)
        # After a fork the number may be that of another file.
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == int(match["inode"]):
            bell = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(bell, _OPENED.pack(inode, os.getpid()))
            finally:
                os.close(bell)


def end_all() -> bool:
    """Lets go of all that waits, when memory is short; gives whether there was any."""
    with _lock:
        ended = list(_leases.values())
        _leases.clear()
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
                ended.append(_leases.pop(inode))
        if not _leases:
            _is_watched = False
            return None
        return min(lease.until_s for lease in _leases.values()) - now


def _hear(bell: int) -> None:
    with contextlib.suppress(BlockingIOError):
        data = os.read(bell, _READ_BYTES // _OPENED.size * _OPENED.size)
        for inode, pid in _OPENED.iter_unpack(data):
            note_opened(inode, pid)


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
