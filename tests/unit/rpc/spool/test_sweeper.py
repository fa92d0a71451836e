"""Sweeping while there is something to sweep."""

from __future__ import annotations

import threading

from mmrpc.rpc.spool.sweeper import Sweeper


def sweepers():
    return [thread for thread in threading.enumerate() if thread.name == "mmrpc-spool"]


def test_it_sweeps_until_nothing_is_left():
    """Armed once; then there is no thread any more, until it is armed again."""
    left, done = [3], threading.Event()

    def sweep():
        left[0] -= 1
        if not left[0]:
            done.set()
        return left[0] > 0

    sweeper = Sweeper(sweep, period_s=0.01)
    for count in (3, 2):
        left[0] = count
        done.clear()
        sweeper.arm()
        sweeper.arm()
        assert done.wait(30)
        for thread in sweepers():
            thread.join(30)
        assert left == [0]


def test_it_can_be_disarmed():
    """What was armed does not happen."""
    swept = threading.Event()
    sweeper = Sweeper(lambda: bool(swept.set()), period_s=60)
    sweeper.arm()
    (thread,) = sweepers()
    sweeper.disarm()
    thread.join(30)
    assert not thread.is_alive()
    assert not swept.is_set()


def test_without_a_thread_it_is_armed_by_the_next_use(monkeypatch):
    """A process at its limit of threads still sends."""
    swept = threading.Event()
    sweeper = Sweeper(lambda: bool(swept.set()), period_s=0.01)

    def no_thread(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        sweeper.arm()
    assert not sweepers()
    sweeper.arm()
    assert swept.wait(30)
