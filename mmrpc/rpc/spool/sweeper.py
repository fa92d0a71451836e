"""Doing something once in a while for as long as there is something to do, and no longer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

IDLE_S: Final = 10.0
"""How long what is not used is kept for the next time."""


class Sweeper:
    """Calls a function a while after it was armed, and again while that says so.

    There is a thread in the meantime only, and it sleeps.

    Args:
        sweep: What to call; it tells whether there is anything left to sweep.
        period_s: The while, in seconds.
    """

    def __init__(self, sweep: Callable[[], bool], period_s: float = IDLE_S) -> None:
        self._sweep = sweep
        self._period_s = period_s
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def arm(self) -> None:
        """Sees to it that the function is called."""
        if self._timer is None:  # without the lock: each message comes by here
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._timer is not None:
                return
            self._timer = threading.Timer(self._period_s, self._run)
            self._timer.daemon = True
            self._timer.name = "mmrpc-spool"
            try:
                self._timer.start()
            except RuntimeError:  # no thread to be had: the next use arms it
                self._timer = None

    def disarm(self) -> None:
        """Takes back what `arm` did."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _run(self) -> None:
        # First, so that what comes while it sweeps is not left out.
        with self._lock:
            self._timer = None
        if self._sweep():
            self.arm()
