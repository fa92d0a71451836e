"""The threads that run what peers ask for.

torch's own pool also completes futures: when all of its threads wait for nested calls, nothing
can answer them any more. So its threads only hand calls over to these.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_RUNNING = 1024
"""Calls that run at a time. Threads start on demand, and an idle one is taken first."""

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None


def submit(fn: Callable[..., None], *args: Any) -> None:
    """Runs a function on a thread of the pool, which starts with the first one."""
    global _executor
    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(_MAX_RUNNING, thread_name_prefix="mmrpc-call")
        _executor.submit(fn, *args)


def stop() -> None:
    """Drops what has not started and lets the threads end; what runs is not waited for."""
    global _executor
    with _lock:
        executor, _executor = _executor, None
    if executor is not None:
        executor.shutdown(wait=False, cancel_futures=True)
