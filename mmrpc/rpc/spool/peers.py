"""Which workers are processes of this host, learnt from the messages that they send anyway."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from mmrpc.core.system import host


class Address(NamedTuple):
    """A process, as another of its host can find it.

    Attributes:
        host: `mmrpc.core.system.host.memory_host_id()`: where its memory can be opened.
        files: `mmrpc.core.system.host.host_id()`: where its paths mean the same.
        pid: Its PID.
        started: Its start time in clock ticks since boot.
        opens: Whether it has found that it may open the memory of the process that this is
            told to.
    """

    host: str
    files: str
    pid: int
    started: int
    opens: bool = False

    @classmethod
    def own(cls) -> Address:
        """That of this process."""
        return cls(host.memory_host_id(), host.host_id(), os.getpid(), host.own_start_time())

    def can_be_opened(self) -> bool:
        """Whether this process may open the memory of that one."""
        if self.host != host.memory_host_id() or self.pid == os.getpid():
            return False
        return _can_be_opened(self.pid, self.started)


@functools.lru_cache(maxsize=4096)
def _can_be_opened(pid: int, started: int) -> bool:
    # Not by comparing users: capabilities, namespaces and security modules have a say, too. The
    # kernel asks for this link what it asks for a descriptor.
    try:
        os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return False
    return host.is_alive(pid, started)


Introduction = tuple[str, Address]
"""Name and address of a worker, as it tells them to another."""

Caller = Introduction | str | None
"""What a call says of its caller: all, or the name if the callee knows the rest."""

_by_name: dict[str, Address] = {}
_confirmed: dict[str, Introduction] = {}


def learn(worker: str, address: Address, told: Caller = None) -> None:
    """Notes where a worker is.

    Args:
        worker: Its name.
        address: What it has told.
        told: What it was told of this worker before: an introduction it now knows; a name was
            not enough.
    """
    known = _by_name.get(worker)
    # What another message has said already: that it may open this process's memory.
    if known is None or known._replace(opens=False) != address:
        _by_name[worker] = address
    if isinstance(told, tuple):
        _confirmed[worker] = told
    elif told is not None:
        _confirmed.pop(worker, None)


def address_of(worker: str) -> Address | None:
    """Where a worker is, if it has told."""
    return _by_name.get(worker)


def confirmed(worker: str) -> Introduction | None:
    """What a worker knows of this one."""
    return _confirmed.get(worker)


def forget() -> None:
    """Forgets all."""
    _by_name.clear()
    _confirmed.clear()
    _can_be_opened.cache_clear()
