"""Shutdown from where and whenever: other threads, many at once, a signal, many groups."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors, rpc
from mmrpc.rpc import torchrpc
from tests.distributed.workers import outcome, run

ENV = {"MMRPC_SHARE_ABOVE_BYTES": str(1 << 20)}
_asked = threading.Event()


def ask() -> None:
    _asked.set()


def in_threads(count: int, graceful: bool = True) -> list[Any]:
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(outcome(lambda: rpc.shutdown(graceful))))
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def leave_in_threads(rank: int, count: int) -> Any:
    rpc.rpc_sync(f"worker{1 - rank}", len, ([],))
    return in_threads(count), outcome(rpc.shutdown)


@pytest.mark.parametrize("count", [1, 4])
def test_any_thread_may_leave(count: int) -> None:
    """One, or several at once; they all return when the group is over."""
    assert run(leave_in_threads, 2, count, shutdown=False) == [([None] * count, None)] * 2


def leave_at_once_meanwhile(rank: int) -> Any:
    if rank:
        _asked.wait(60)
        return outcome(rpc.shutdown).cls
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(outcome(rpc.shutdown)))
    waiting.start()
    rpc.rpc_sync("worker1", len, ([],))
    left = outcome(lambda: rpc.rpc_async("worker1", ask).wait())
    rpc.shutdown(graceful=False)
    waiting.join(60)
    return left, found


def test_a_thread_may_leave_at_once_while_another_waits() -> None:
    """The one that waits for the others returns, too, and the others are told."""
    assert run(leave_at_once_meanwhile, 2, shutdown=False) == [(None, [None]), errors.PeerLostError]


def leave_by_signal(rank: int, leaves: bool) -> Any:
    if rank:
        # It comes to its own shutdown when the other one is gone.
        while outcome(lambda: rpc.rpc_sync("worker0", len, ([],))) == 0:
            time.sleep(0.05)
        return outcome(rpc.shutdown).cls

    def handle(*_: Any) -> None:
        if leaves:
            rpc.shutdown(graceful=False)
        raise SystemExit(5)

    signal.signal(signal.SIGTERM, handle)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    rpc.rpc_sync("worker1", len, ([],))
    timer.start()
    try:
        rpc.shutdown()
    except SystemExit as error:
        return error.code, torchrpc.is_initialized()
    return None


@pytest.mark.parametrize("leaves", [False, True])
def test_a_signal_ends_the_wait_of_a_shutdown(leaves: bool) -> None:
    """Its handler may leave itself; either way no agent is left behind."""
    first, second = run(leave_by_signal, 2, leaves, shutdown=False)
    assert first == (5, False)
    assert second is errors.PeerLostError


def used() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "MiB": resident_bytes >> 20,
    }


def come_and_go(rank: int, rounds: int) -> Any:
    found = []
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    for number in range(rounds):
        if number:
            rpc.init_rpc(f"worker{rank}")
        mapped = MemoryMappedTensor.from_tensor(torch.ones(1000))
        for tensor in (mapped, torch.ones(1 << 20)):
            for _ in range(3):
                rpc.rpc_sync(f"worker{1 - rank}", torch.sum, (tensor,))
        rpc.shutdown()
        found.append(used())
    return found


def test_groups_come_and_go_without_a_trace() -> None:
    """Neither descriptors nor threads nor memory grow with their number, on one port."""
    for found in run(come_and_go, 2, 12, env=ENV, shutdown=False):
        early, late = found[3], found[-1]
        assert late["descriptors"] <= early["descriptors"] + 1
        assert late["threads"] <= early["threads"] + 2
        assert late["MiB"] <= early["MiB"] + 64
