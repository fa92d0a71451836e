"""Calls that may never return, such as `open` on a dead network file system."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T], undo: Callable[[T], object] | None) -> None:
        self._function = function
        self._undo = undo
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._abandoned = False
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            result = self._function()
        except BaseException as error:
            self._error = error
        else:
            with self._lock:
                late = self._abandoned
                if not late:
                    self._result.append(result)
            if late and self._undo is not None:
                self._undo(result)
        self._done.set()

    def wait(self, timeout_s: float) -> T:
        self._done.wait(timeout_s)
        with self._lock:
            if self._result:
                return self._result[0]
            if self._error is None:
                self._abandoned = True
                raise TimeoutError(f"no answer within {timeout_s:g} s")
        raise self._error


def within(
    timeout_s: float, function: Callable[[], T], *, undo: Callable[[T], object] | None = None
) -> T:
    """Calls a function in a thread of its own and waits for it so long at most.

    A call that does not come back keeps its (daemon) thread, since nothing can end it.

    Args:
        timeout_s: Seconds to wait.
        function: What to call; its exception is raised here.
        undo: Called with a result that comes too late, to give up what it holds.

    Raises:
        TimeoutError: If there is neither a result nor an exception in time.
    """
    call = _Call(function, undo)
    threading.Thread(target=call.run, name="mmrpc-deadline", daemon=True).start()
    return call.wait(timeout_s)
