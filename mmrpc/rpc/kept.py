"""Mappings that were just received, kept for a moment: the next call often brings them again.

A mapping that goes with the last tensor on it has to be made anew by each call, and every page of
it found again. So a worker holds on to what peers sent it, for some seconds and not too many.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from mmrpc.core.location import Mode

if TYPE_CHECKING:
    from mmrpc.core.location import Location, Resolver
    from mmrpc.core.mapping import Mapping

KEEP_S: Final = 10.0
KEEP_AT_MOST: Final = 64

_lock = threading.Lock()


class KeepingResolver:
    """A resolver that holds on to what it attached.

    Only shared mappings are kept: a private one may be written to, and would have to be looked
    through before it is used again.

    Args:
        resolver: What finds and checks; it does so each time, kept or not.
        keep_s: Seconds for which a mapping is kept after it was asked for last.
    """

    def __init__(self, resolver: Resolver, keep_s: float = KEEP_S) -> None:
        self.resolver = resolver
        self._keep_s = keep_s
        self._kept: OrderedDict[Mapping, float] = OrderedDict()
        self._timer: threading.Timer | None = None

    @property
    def node(self) -> str | None:
        """Name of this node."""
        return self.resolver.node

    def locate(self, mapping: Mapping) -> Location:
        """As the resolver that it holds."""
        return self.resolver.locate(mapping)

    def attach(self, location: Location, mode: Mode, needed_bytes: int) -> Mapping:
        """As the resolver that it holds."""
        mapping = self.resolver.attach(location, mode, needed_bytes)
        if mode is Mode.WRITE:
            self._keep(mapping)
        return mapping

    def __getattr__(self, name: str) -> object:
        # What one of the resolvers has besides, such as the files of a mount by name.
        return getattr(self.resolver, name)

    def _keep(self, mapping: Mapping) -> None:
        with _lock:
            self._kept[mapping] = time.monotonic() + self._keep_s
            self._kept.move_to_end(mapping)
            dropped = self._kept.popitem(last=False) if len(self._kept) > KEEP_AT_MOST else None
            if self._timer is None:
                self._start_timer(self._keep_s)
        del dropped  # unmapped outside the lock

    def _start_timer(self, wait_s: float) -> None:
        self._timer = threading.Timer(wait_s, self._drop_old)
        self._timer.daemon = True
        self._timer.start()

    def _drop_old(self) -> None:
        dropped = []
        with _lock:
            now = time.monotonic()
            while self._kept and next(iter(self._kept.values())) <= now:
                dropped.append(self._kept.popitem(last=False))
            self._timer = None
            if self._kept:
                self._start_timer(next(iter(self._kept.values())) - now)

    def close(self) -> None:
        """Lets go of all."""
        with _lock:
            timer, self._timer = self._timer, None
            kept, self._kept = self._kept, OrderedDict()
        if timer is not None:
            timer.cancel()
        kept.clear()


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_in_child)
