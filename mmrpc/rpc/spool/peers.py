"""Which workers are processes of this host, learnt from the messages that they send anyway."""

from __future__ import annotations

import os
from typing import NamedTuple

from mmrpc.core import host


class Address(NamedTuple):
    """A process, as another of its host can find it.

    Attributes:
        host: `mmrpc.core.host.memory_host_id()`: where its memory can be opened.
        files: `mmrpc.core.host.host_id()`: where its paths mean the same.
        pid: Its PID.
        started: Its start time in clock ticks since boot.
        uid: Its user; another user's memory cannot be opened.
    """

    host: str
    files: str
    pid: int
    started: int
    uid: int

    @classmethod
    def own(cls) -> Address | None:
        """That of this process; None if others of its user may not open its memory."""
        try:
            if os.stat(f"/proc/{os.getpid()}").st_uid != os.geteuid():
                return None  # not dumpable, see proc(5)
        except OSError:
            return None
        return cls(
            host.memory_host_id(),
            host.host_id(),
            os.getpid(),
            host.own_start_time(),
            os.geteuid(),
        )

    def shares_memory(self) -> bool:
        """Whether this process and that one can use each other's memory."""
        return (
            self.host == host.memory_host_id()
            and self.uid == os.geteuid()
            and self.pid != os.getpid()
        )


_by_name: dict[str, Address] = {}


def learn(worker: str, address: Address) -> None:
    """Notes where a worker is."""
    _by_name[worker] = address


def address_of(worker: str) -> Address | None:
    """Where a worker is, if it has told."""
    return _by_name.get(worker)


def forget() -> None:
    """Forgets all."""
    _by_name.clear()
