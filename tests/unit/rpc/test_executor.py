"""Threads for calls: as many as run, and none that keeps a process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref

import pytest

from mmrpc.rpc.executor import CallThreads


def test_calls_that_wait_for_later_calls_end() -> None:
    """There is a thread for each, however many wait."""
    threads = CallThreads(idle_s=0.1)
    depth = 200
    events = [threading.Event() for _ in range(depth + 1)]

    def wait_for_next(n: int) -> None:
        threads.submit(wait_for_next, n + 1) if n + 1 < depth else events[depth].set()
        assert events[n + 1].wait(60)
        events[n].set()

    threads.submit(wait_for_next, 0)
    assert events[0].wait(60)
    threads.stop()


def test_an_idle_thread_is_used_again() -> None:
    """A second call does not start a second thread."""
    threads = CallThreads()
    names: list[str] = []
    done = threading.Semaphore(0)

    def note() -> None:
        names.append(threading.current_thread().name)
        done.release()

    for _ in range(3):
        threads.submit(note)
        assert done.acquire(timeout=30)
        while not threads._idle:  # the call is over a moment before its thread is idle
            time.sleep(0.001)
    assert len(set(names)) == 1
    threads.stop()


def test_threads_end_after_a_while_and_when_stopped() -> None:
    """Nobody is left that could be waited for."""
    short, stopped = CallThreads(idle_s=0.01), CallThreads(idle_s=600)
    workers: list[threading.Thread] = []
    came = threading.Barrier(3)

    def note() -> None:
        workers.append(threading.current_thread())
        came.wait(30)

    short.submit(note)
    stopped.submit(note)
    came.wait(30)
    stopped.stop()
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()


def test_a_stopped_pool_takes_no_calls() -> None:
    """The caller is told, rather than left waiting."""
    threads = CallThreads()
    threads.stop()
    with pytest.raises(RuntimeError, match="takes no calls"):
        threads.submit(print)


def test_a_call_that_never_returns_does_not_keep_the_process() -> None:
    """At its end, Python does not join it."""
    program = (
        "import threading\n"
        "from mmrpc.rpc.executor import CallThreads\n"
        "started = threading.Event()\n"
        "def forever():\n"
        "    started.set()\n"
        "    threading.Event().wait()\n"
        "CallThreads().submit(forever)\n"
        "started.wait()\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_an_idle_thread_holds_nothing_of_its_last_call() -> None:
    """What a call was given is freed when it ends, not when the thread has another."""

    class Payload:
        pass

    threads = CallThreads()
    payload, done = Payload(), threading.Event()
    freed = threading.Event()
    weakref.finalize(payload, freed.set)
    threads.submit(lambda _: done.set(), payload)
    del payload
    assert done.wait(30)
    assert freed.wait(30)
    threads.stop()
