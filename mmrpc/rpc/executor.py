"""The threads that run what peers ask for.

torch's own pool also completes futures: when all of its threads wait for nested calls, nothing
can answer them any more; and its shutdown waits for every call that is on one. So calls run on
threads of ours, of which there are as many as calls run at the time. They are daemons, as
`concurrent.futures` has none: a call that never returns must not keep a process alive that has
left its group.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Job = tuple[Callable[..., None], tuple[Any, ...]]

_IDLE_S = 60.0
"""How long a thread waits for another call before it ends."""

_GRACE_S = 2.0
"""How long calls may take to end when this worker has left its group."""


class CallThreads:
    """Threads that start on demand; an idle one is taken first, and ends after a while."""

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait for a job and that no job in the queue is meant for
        self._stopped = False
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count()

    def submit(self, fn: Callable[..., None], *args: Any) -> None:
        """Runs a function soon; it must not raise.

        Raises:
            RuntimeError: After `stop`.
        """
        with self._lock:
            if self._stopped:
                raise RuntimeError("this worker has shut down and takes no calls")
            if self._idle:
                self._idle -= 1
            else:
                self._start_thread()
            self._jobs.put((fn, args))

    def stop(self, wait_s: float = 0.0) -> None:
        """Lets idle threads end, and others when their call does.

        Args:
            wait_s: Seconds to wait for them at most. Calls that wait for other workers end when
                the agent has; a thread that Python's end meets inside torch aborts the process.
        """
        with self._lock:
            self._stopped = True
            threads = self._threads - {threading.current_thread()}
            for _ in self._threads:
                self._jobs.put(None)
        deadline_s = time.monotonic() + wait_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _start_thread(self) -> None:
        name = f"mmrpc-call-{next(self._numbers)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._threads.add(thread)

    def _run(self) -> None:
        while self._run_next():
            with self._lock:
                self._idle += 1
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _run_next(self) -> bool:
        # An idle thread must hold nothing of its last call: that would keep mappings alive, and
        # a tensor that a daemon frees while the interpreter ends aborts the process.
        job = self._next()
        if job is None:
            return False
        fn, args = job
        fn(*args)
        return True

    def _next(self) -> Job | None:
        while True:
            try:
                return self._jobs.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if self._idle:  # no job is on its way to this thread
                        self._idle -= 1
                        return None


_threads = CallThreads()


def run(fn: Callable[..., None], *args: Any) -> None:
    """Runs a function that must not raise, soon, on a thread of ours."""
    _threads.submit(fn, *args)


def run_anyhow(fn: Callable[..., None], *args: Any) -> None:
    """Like `run`, but at once on this thread if there is no other for it."""
    try:
        run(fn, *args)
    except RuntimeError:  # the threads have ended, or the system gives no more
        fn(*args)


def restart() -> None:
    """Ends the threads of a group that this process left, and has new ones for the next."""
    global _threads
    _threads.stop(_GRACE_S)
    _threads = CallThreads()


def _in_child() -> None:
    global _threads
    _threads = CallThreads()  # threads are not inherited, and a lock may be held for good


os.register_at_fork(after_in_child=_in_child)
