"""Calls that may never return, such as `open` on a dead network file system."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Deadline:
    """A limit for calls to one thing that may hang, such as a mount.

    A call that does not come back keeps its (daemon) thread, since nothing can end it. While
    there is one, further calls fail at once, so that a dead mount costs one thread and not one
    for each reference.

    Args:
        timeout_s: Seconds that a call may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._stuck: set[_Call[object]] = set()

    def call(self, function: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
        """Calls a function in a thread of its own and waits for it until the deadline.

        Args:
            function: What to call; its exception is raised here.
            undo: Called with a result that comes too late, to give up what it holds.

        Raises:
            TimeoutError: If there is neither a result nor an exception in time.
        """
        if any(not call.done.is_set() for call in tuple(self._stuck)):
            raise TimeoutError("an earlier call has had no answer yet")
        self._stuck.clear()
        call = _Call(function, undo)
        threading.Thread(target=call.run, name="mmrpc-deadline", daemon=True).start()
        try:
            return call.wait(self.timeout_s)
        except TimeoutError:
            self._stuck.add(call)  # type: ignore[arg-type]
            raise


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T], undo: Callable[[T], object] | None) -> None:
        self.done = threading.Event()
        self._function = function
        self._undo = undo
        self._lock = threading.Lock()
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
        self.done.set()

    def wait(self, timeout_s: float) -> T:
        self.done.wait(timeout_s)
        with self._lock:
            if self._result:
                return self._result.pop()
            if self._error is None:
                self._abandoned = True
                raise TimeoutError(f"no answer within {timeout_s:g} s")
        raise self._error
