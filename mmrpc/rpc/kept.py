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

from mmrpc.core.location import FileLocation, Mode
from mmrpc.core.mapping import FileMapping

if TYPE_CHECKING:
    from mmrpc.core.location import Location
    from mmrpc.core.mapping import Mapping
    from mmrpc.core.resolver import Resolver

KEEP_S: Final = 10.0
KEEP_AT_MOST: Final = 64

_lock = threading.Lock()


class KeepingResolver:
    """A resolver that holds on to what it attached.

    Only shared mappings are kept: a private one may be written to, and would have to be looked
    through before it is used again.

    Args:
        resolver: What finds and checks. It does so each time, kept or not, but for the same
            location of a file of this host: there, its name still has to have the file.
        keep_s: Seconds for which a mapping is kept after it was asked for last.
    """

    def __init__(self, resolver: Resolver, keep_s: float = KEEP_S) -> None:
        self.resolver = resolver
        self._keep_s = keep_s
        self._kept: OrderedDict[Location, tuple[Mapping, float]] = OrderedDict()
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
        if mode is not Mode.WRITE:
            return self.resolver.attach(location, mode, needed_bytes)
        mapping = self._again(location, needed_bytes)
        if mapping is None:
            mapping = self.resolver.attach(location, mode, needed_bytes)
        self._keep(location, mapping)
        return mapping

    def local_path(self, url: str, *, writing: bool) -> str:
        """As the resolver that it holds."""
        return self.resolver.local_path(url, writing=writing)

    def local_copy(self, url: str) -> str:
        """As the resolver that it holds."""
        return self.resolver.local_copy(url)

    def _again(self, location: Location, needed_bytes: int) -> Mapping | None:
        if type(location) is not FileLocation:
            return None
        mapping, _ = self._kept.get(location, (None, 0))
        if isinstance(mapping, FileMapping) and mapping.still_has(needed_bytes):
            return mapping
        return None

    def _keep(self, location: Location, mapping: Mapping) -> None:
        with _lock:
            self._kept[location] = mapping, time.monotonic() + self._keep_s
            self._kept.move_to_end(location)
            dropped = self._kept.popitem(last=False) if len(self._kept) > KEEP_AT_MOST else None
            if self._timer is None:
                self._start_timer(self._keep_s)
        del dropped  # unmapped outside the lock

    def _start_timer(self, wait_s: float) -> None:
        self._timer = threading.Timer(wait_s, self._drop_old)
        self._timer.daemon = True
        try:
            self._timer.start()
        except RuntimeError:  # no thread to be had: the next one that comes starts it
            self._timer = None

    def _drop_old(self) -> None:
        dropped = []
        with _lock:
            now = time.monotonic()
            while self._kept and self._oldest_ends_s() <= now:
                dropped.append(self._kept.popitem(last=False))
            self._timer = None
            if self._kept:
                self._start_timer(self._oldest_ends_s() - now)

    def _oldest_ends_s(self) -> float:
        return next(iter(self._kept.values()))[1]

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
