"""Messages between ranks and one coordinator over a store: nobody polls, all is counted once.

Keys: ``in/count`` and ``in/<i>`` are what came to the coordinator, in order of arrival;
``out/<rank>/<i>`` is what it told a rank. Each is written once, so a rank that comes late reads
what the others have read.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistStoreError

from mmrpc.rpc.handshake import messages

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mmrpc.rpc.handshake.report import Frozen

_LONG = timedelta(days=1)


class Board:
    """One process's view of the store.

    Args:
        store: A store that no other thread uses.
        prefix: What all keys begin with: one per handshake.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._taken = 0
        self._told: dict[int, int] = {}
        self._read = 0

    def post(self, message: Frozen) -> None:
        """Tells the coordinator."""
        index = self._store.add(f"{self._prefix}in/count", 1)
        self._store.set(f"{self._prefix}in/{index}", message.model_dump_json())

    def take(self) -> messages.ToCoordinator:
        """Waits for the next message to the coordinator; only `Expired` limits how long."""
        self._taken += 1
        return messages.to_coordinator.validate_json(
            self._get(f"{self._prefix}in/{self._taken}", _LONG)
        )

    def tell(self, rank: int, message: Frozen) -> None:
        """Tells one rank, after what it was told before."""
        index = self._told[rank] = self._told.get(rank, 0) + 1
        self._store.set(f"{self._prefix}out/{rank}/{index}", message.model_dump_json())

    def hear(self, rank: int, timeout_s: float) -> messages.ToRank:
        """Waits for what the coordinator tells this rank next.

        Raises:
            TimeoutError: If it says nothing in time.
        """
        self._read += 1
        key = f"{self._prefix}out/{rank}/{self._read}"
        return messages.to_rank.validate_json(self._get(key, timedelta(seconds=timeout_s)))

    def acknowledge(self, present: int) -> None:
        """Says that this rank has read the verdict."""
        if self._store.add(f"{self._prefix}read", 1) >= present:
            self._store.set(f"{self._prefix}all-read", "1")

    def wait_until_read(self, timeout_s: float) -> bool:
        """Waits until all who are there have read the verdict."""
        try:
            self._get(f"{self._prefix}all-read", timedelta(seconds=timeout_s))
        except TimeoutError:
            return False
        return True

    def _get(self, key: str, timeout: timedelta) -> bytes:
        start = time.monotonic()
        try:
            self._store.wait([key], timeout)
        except DistStoreError as error:
            waited = time.monotonic() - start
            raise TimeoutError(f"no {key} within {waited:.1f} s") from error
        return self._store.get(key)
