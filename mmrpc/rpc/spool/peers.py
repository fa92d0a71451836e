"""Which workers are processes of this host, learnt from the messages that they send anyway."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from mmrpc.core.system import host
from mmrpc.rpc import torchrpc


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

_own: Address | None = None
_by_name: dict[str, Address] = {}
_confirmed: dict[str, Introduction] = {}  # what each worker knows of this one


def start() -> None:
    """From now on, calls say where this process is."""
    global _own
    _own = Address.own()


def forget() -> None:
    """Forgets all, and says no more where this process is."""
    global _own
    _own = None
    _by_name.clear()
    _confirmed.clear()
    _can_be_opened.cache_clear()


os.register_at_fork(after_in_child=forget)  # a child is another process, and no worker


def own_address(to: Address | None = None) -> Address | None:
    """What this process tells another, so that it can send to this one through memory.

    Args:
        to: Where that one is, if it is known.
    """
    return _own and _own._replace(opens=to is not None and to.can_be_opened())


def introduce(worker: str) -> Caller:
    """What a call tells a worker about this one: as little as that does not know yet.

    Args:
        worker: Name of the worker that is called.
    """
    if _own is None:
        return None
    known = _confirmed.get(worker)
    if known is not None and known[1].opens:
        return known[0]
    to = _by_name.get(worker)
    if known is not None and (to is None or not to.can_be_opened()):
        return known[0]
    return torchrpc.own_name(), own_address(to) or _own


def meet(caller: Caller) -> tuple[Address | None, Address | None]:
    """Reads what a caller said of itself.

    Returns:
        Where the caller is, if that is known; and what it is to be told about this process, if
        anything.
    """
    if caller is None:
        return None, None
    if isinstance(caller, str):
        address = _by_name.get(caller)
        return address, own_address() if address is None else None
    learn(*caller)
    return caller[1], own_address(caller[1])


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
