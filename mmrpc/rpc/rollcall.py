"""Who is there, before RPC begins without a cluster's config.

torch waits half an hour for a worker that is absent, and does not say which. So the ranks meet at
the store first: each tells rank 0 who it is, and rank 0 tells all whether they are complete.
A cluster's handshake does this and more; it knows a config, and takes longer to import.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import DistError, DistStoreError

from mmrpc.errors import HandshakeError
from mmrpc.rpc import rendezvous

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

    from mmrpc.rpc.rendezvous import Endpoint

_MARGIN_S = 5.0
"""How much longer a rank waits than rank 0 does, so that it hears what rank 0 says."""
_READ_S = 10.0
"""How long rank 0 stays for those who have not yet heard that the group failed."""
_MOST_NAMED = 20
"""How many absent ranks an error names."""
_COMPLETE = "complete"

_groups = 0
"""How many groups this process has been in; each meets under keys of its own."""


class Hello(NamedTuple):
    """What a rank says of itself.

    Attributes:
        rank: Its number.
        world_size: How many ranks it expects.
        worker: Its name.
        process: Which process it is.
    """

    rank: int
    world_size: int
    worker: str
    process: str


class Finding(NamedTuple):
    """Why a group does not come about, the same for all."""

    reason: str
    hint: str
    rank: int | None = None

    def error(self) -> HandshakeError:
        """What every rank raises."""
        return HandshakeError(self.reason, rank=self.rank, hint=self.hint)


class Roll:
    """The list of rank 0; no I/O.

    Args:
        world_size: How many ranks there should be.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._hellos: dict[int, Hello] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all are there."""
        return len(self._hellos) == self._world_size

    def add(self, hello: Hello) -> Finding | None:
        """Takes one down, or says why it cannot be in the group with the others."""
        rank = hello.rank
        if hello.world_size != self._world_size:
            return Finding(
                f"rank {rank} expects {hello.world_size} workers, and rank 0 expects"
                f" {self._world_size}",
                "Pass the same world_size to all.",
                rank,
            )
        if not 0 <= rank < self._world_size:
            return Finding(
                f"rank {rank} is not below the world size, {self._world_size}",
                "Ranks count from 0.",
                rank,
            )
        other = self._hellos.get(rank)
        if other is not None:
            return Finding(
                f"two processes have rank {rank}: {other.process} and {hello.process}",
                "Give each worker a rank of its own.",
                rank,
            )
        for other in self._hellos.values():
            if other.worker == hello.worker:
                return Finding(
                    f"rank {rank} has the name {hello.worker!r}, as rank {other.rank} does",
                    "Give each worker a name of its own.",
                    rank,
                )
        self._hellos[rank] = hello
        return None

    def absent(self, timeout_s: float, endpoint: Endpoint) -> Finding:
        """Says who did not come."""
        ranks = [rank for rank in range(self._world_size) if rank not in self._hellos]
        named = [str(rank) for rank in ranks[:_MOST_NAMED]]
        if len(ranks) > _MOST_NAMED:
            named.append(f"{len(ranks) - _MOST_NAMED} more")
        who = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
        return Finding(
            f"rank{'s' * (len(ranks) > 1)} {who} of {self._world_size} did not come within"
            f" {timeout_s:g} s",
            f"Look at the logs there, and whether {endpoint.host}:{endpoint.port} can be reached.",
            ranks[0],
        )


def meet(endpoint: Endpoint, worker: str, rank: int, world_size: int, timeout_s: float) -> TCPStore:
    """Waits until all ranks are there.

    Args:
        endpoint: Where they meet.
        worker: Name of this worker.
        rank: Its number.
        world_size: How many there are.
        timeout_s: How long to wait for the others, in seconds.

    Returns:
        The store at which they met, on rank 0 hosted by this process.

    Raises:
        HandshakeError: The same on every rank that came: who is absent, or cannot be in one
            group with the others; or, on one rank, that it does not reach rank 0.
    """
    deadline_s = time.monotonic() + timeout_s
    if rank == 0 and not endpoint.is_agents:
        store = rendezvous.host_store(endpoint, timeout_s, None)
    else:
        store = rendezvous.connect_store(endpoint, timeout_s, rank, None)
    process = f"process {os.getpid()} on {socket.gethostname()}"
    hello = Hello(rank, world_size, worker, process)
    try:
        finding = _take_part(store, hello, endpoint, timeout_s, deadline_s)
    except DistStoreError as error:
        raise HandshakeError(
            f"rank 0 gave rank {rank} no answer at {endpoint.host}:{endpoint.port} within"
            f" {timeout_s:g} s",
            rank=0,
            hint="Was it started, and by mmrpc.rpc? Look at its log.",
        ) from error
    except DistError as error:
        raise HandshakeError(
            f"rank {rank} lost rank 0 at {endpoint.host}:{endpoint.port}",
            rank=0,
            hint="Look at the log of rank 0.",
        ) from error
    if finding is not None:
        raise finding.error()
    return store


def begun() -> None:
    """Notes that the group exists; the next one of this process will be another."""
    global _groups
    _groups += 1


def _take_part(
    store: Store, hello: Hello, endpoint: Endpoint, timeout_s: float, deadline_s: float
) -> Finding | None:
    prefix = f"mmrpc/rollcall/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{_groups}/"
    if hello.rank == 0:
        session = secrets.token_hex(8)
        # If there is another rank 0, it shall hear of this one.
        if store.compare_set(f"{prefix}session", "", session) == session.encode():
            keys = f"{prefix}{session}/"
            finding = _call_the_roll(store, keys, hello, endpoint, timeout_s, deadline_s)
            if finding is None:
                store.set(f"{prefix}session", _COMPLETE)
            else:
                store.delete_key(f"{prefix}session")
            _conclude(store, keys, finding)
            return finding
    _wait(store, f"{prefix}session", deadline_s)
    session = store.get(f"{prefix}session").decode()
    if session == _COMPLETE:
        return Finding(
            f"rank {hello.rank} came to a group that is complete at"
            f" {endpoint.host}:{endpoint.port}",
            "Was its rank given to another process, too, or the port to another group?",
            hello.rank,
        )
    keys = f"{prefix}{session}/"
    index = store.add(f"{keys}count", 1)
    store.set(f"{keys}in/{index}", json.dumps(hello))
    _wait(store, f"{keys}out", deadline_s + _MARGIN_S)
    told = json.loads(store.get(f"{keys}out"))
    if told is None:
        return None
    present, *what = told
    if store.add(f"{keys}read", 1) >= present:
        store.set(f"{keys}all-read", "")
    return Finding(*what)


def _call_the_roll(
    store: Store,
    keys: str,
    own: Hello,
    endpoint: Endpoint,
    timeout_s: float,
    deadline_s: float,
) -> Finding | None:
    roll = Roll(own.world_size)
    finding, taken = roll.add(own), 0
    while finding is None and not roll.is_complete:
        taken += 1
        try:
            _wait(store, f"{keys}in/{taken}", deadline_s)
        except DistStoreError:
            finding = roll.absent(timeout_s, endpoint)
        else:
            finding = roll.add(Hello(*json.loads(store.get(f"{keys}in/{taken}"))))
    return finding


def _conclude(store: Store, keys: str, finding: Finding | None) -> None:
    if finding is None:
        store.set(f"{keys}out", "null")
        return
    # Also those that came meanwhile, whom nobody has looked at, are to hear it.
    present = store.add(f"{keys}count", 0)
    store.set(f"{keys}out", json.dumps([present, *finding]))
    if present:
        with contextlib.suppress(DistStoreError):
            store.wait([f"{keys}all-read"], timedelta(seconds=_READ_S))


def _wait(store: Store, key: str, deadline_s: float) -> None:
    store.wait([key], timedelta(seconds=max(deadline_s - time.monotonic(), 0.001)))
