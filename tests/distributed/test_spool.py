"""Large plain tensors between workers of one host go through memory that both keep mapped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from typing import Any

import pytest
import torch

import mmrpc.rpc as rpc
from mmrpc.errors import PeerLostError, RpcTimeoutError
from mmrpc.rpc.spool import policy, received
from mmrpc.rpc.spool import slots as slots_module
from mmrpc.rpc.spool.sweeper import Sweeper
from tests.distributed.workers import run

LARGE = 1 << 20  # elements of float32: 4 MiB
ENV = {"MMRPC_SHARE_ABOVE_BYTES": str(1 << 20)}
_is_nobody = threading.Event()
_kept: list[torch.Tensor] = []


def add_one(x: torch.Tensor) -> torch.Tensor:
    """Changes what it got in place, and gives it back."""
    x += 1
    return x


def keep(x: torch.Tensor) -> None:
    _kept.append(x)


def sums_of_kept() -> list[float]:
    return [float(x.sum()) for x in _kept]


def forget_kept() -> None:
    _kept.clear()


def slots_mapped() -> int:
    return len(received._mapped)


def both(pair: dict[str, Any]) -> Any:
    return pair


def fail(x: torch.Tensor) -> None:
    raise ValueError("no")


def slots() -> list[Any]:
    pool = policy._pool
    return [] if pool is None else pool._slots


def shorten(lease_s: float) -> None:
    """Gives slots back after a moment, and those that nobody releases after the lease."""
    slots_module.LEASE_S = lease_s  # type: ignore[misc]
    pool = policy._pool
    assert pool is not None
    pool.sweeper = Sweeper(pool.sweep, 0.05)
    received._sweeper = Sweeper(received._sweep, 0.05)
    received.IDLE_S = 0.05  # type: ignore[misc]


def by_value(rank: int) -> None:
    if rank:
        return
    x = torch.zeros(LARGE)
    for _ in range(8):
        y = rpc.rpc_sync("worker1", add_one, (x,))
        assert float(y.sum()) == LARGE
        assert float(x.sum()) == 0
    # The callee may still hold the one of the call before when the next call is made.
    assert 1 <= len(slots()) <= 2
    assert 1 <= rpc.rpc_sync("worker1", slots_mapped) <= 2


def test_values_stay_values() -> None:
    """What the callee writes stays with it, and one slot serves call after call."""
    run(by_value, 2, env=ENV)


def not_reused(rank: int) -> None:
    if rank:
        return
    rpc.rpc_sync("worker1", sums_of_kept)  # the first reply tells where the worker is
    for value in range(4):
        rpc.rpc_sync("worker1", keep, (torch.full((LARGE,), float(value)),))
    assert rpc.rpc_sync("worker1", sums_of_kept) == [LARGE * float(v) for v in range(4)]
    assert len(slots()) == 4
    rpc.rpc_sync("worker1", forget_kept)
    rpc.rpc_sync("worker1", keep, (torch.full((LARGE,), 9.0),))
    assert len(slots()) == 4
    assert rpc.rpc_sync("worker1", sums_of_kept) == [LARGE * 9.0]


def test_a_slot_is_not_reused_while_its_tensor_lives() -> None:
    """Tensors that the receiver keeps stay as they were sent; their slots come back after."""
    run(not_reused, 2, env=ENV)


def shapes_and_graphs(rank: int) -> None:
    if rank:
        return
    rpc.rpc_sync("worker1", slots_mapped)
    x = torch.arange(LARGE, dtype=torch.int64).view(1024, -1)
    got = rpc.rpc_sync("worker1", both, ({"a": x, "b": x.t(), "c": [x, x[3:]]},))
    assert torch.equal(got["a"], x)
    assert torch.equal(got["b"], x.t())
    assert torch.equal(got["c"][1], x[3:])
    leaf = torch.ones(LARGE, requires_grad=True)
    assert rpc.rpc_sync("worker1", both, ({"leaf": leaf},))["leaf"].sum() == LARGE
    with_error(x)


def with_error(x: torch.Tensor) -> None:
    count = len(slots())
    for _ in range(5):
        with pytest.raises(ValueError, match="no"):
            rpc.rpc_sync("worker1", fail, (x,))
    assert len(slots()) <= count + 1


def test_shapes_views_and_errors() -> None:
    """Any mix of tensors arrives as it is; a call that fails gives its slots back."""
    run(shapes_and_graphs, 2, env=ENV)


def killed_sender(rank: int) -> None:
    shorten(60)
    if rank == 1:
        rpc.rpc_sync("worker0", slots_mapped)
        rpc.rpc_sync("worker0", slots_mapped)
        with contextlib.suppress(RuntimeError):
            rpc.rpc_sync("worker0", keep, (torch.ones(LARGE),), timeout=20)
        os._exit(3)
    deadline = time.monotonic() + 60
    while not _kept or slots_mapped():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sums_of_kept() == [LARGE]
    rpc.shutdown(graceful=False)


def test_slots_of_a_killed_sender_are_let_go() -> None:
    """When a sender has died its memory goes, but for the tensors that came from it."""
    run(killed_sender, 2, env=ENV, may_die=("worker1",), shutdown=False)


def killed_receiver(rank: int) -> None:
    if rank == 1:
        threading.Event().wait(60)  # until it is told to die
        return
    rpc.rpc_sync("worker1", slots_mapped)
    rpc.rpc_sync("worker1", keep, (torch.zeros(LARGE),))
    (slot,) = slots()
    assert not slot.is_free()
    with contextlib.suppress(PeerLostError):
        rpc.rpc_sync("worker1", os._exit, (3,), timeout=20)
    deadline = time.monotonic() + 60
    while not slot.is_free():  # the connection ends a moment before the process
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rpc.shutdown(graceful=False)


def test_slots_of_a_killed_receiver_are_free() -> None:
    """A receiver that dies with a tensor in its hands leaves the slot to its sender."""
    run(killed_receiver, 2, env=ENV, may_die=("worker1",), shutdown=False)


def over_quota(rank: int) -> None:
    if rank:
        return
    policy._pool = policy.Pool(8 << 20)
    rpc.rpc_sync("worker1", slots_mapped)
    for value in range(4):
        rpc.rpc_sync("worker1", keep, (torch.full((LARGE,), float(value)),))
    assert sum(slot.nbytes for slot in slots()) <= 8 << 20
    assert rpc.rpc_sync("worker1", sums_of_kept) == [LARGE * float(v) for v in range(4)]


def test_beyond_the_quota_tensors_go_as_ever() -> None:
    """Memory for slots is bounded; what does not fit travels by TensorPipe."""
    run(over_quota, 2, env=ENV)


def large_and_lock() -> Any:
    return torch.ones(LARGE), threading.Lock()


def slots_free() -> list[bool]:
    return [slot.is_free() for slot in slots()]


def fails_to_pickle(rank: int) -> None:
    if rank:
        return
    rpc.rpc_sync("worker1", slots_mapped)
    for _ in range(4):
        with pytest.raises(AttributeError, match="lambda"):
            rpc.rpc_sync("worker1", both, ({"x": torch.ones(LARGE), "f": lambda: 0},))
        with pytest.raises(TypeError, match="lock"):
            rpc.rpc_sync("worker1", large_and_lock)
    assert slots_free() == [True]
    assert rpc.rpc_sync("worker1", slots_free) == [True]


def test_a_message_that_is_never_sent_keeps_no_slot() -> None:
    """What does not pickle behind a large tensor, in arguments and in results."""
    run(fails_to_pickle, 2, env=ENV)


def become_nobody(dumpable: int) -> None:
    """Of both workers, since root may open everything."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    set_dumpable(dumpable)
    _is_nobody.set()
    rpc.rpc_sync(f"worker{1 - rpc.get_worker_info().id}", wait_until_nobody)


def wait_until_nobody() -> None:
    assert _is_nobody.wait(60)


def set_dumpable(dumpable: int) -> None:
    """Says whether others of this user may open this process's memory."""
    ctypes.CDLL(None).prctl(4, dumpable, 0, 0, 0)  # PR_SET_DUMPABLE


def hide_later(rank: int, hidden: int) -> Any:
    become_nobody(dumpable=1)
    if rank:
        return None
    for _ in range(3):
        x = rpc.rpc_sync("worker1", add_one, (torch.zeros(LARGE),))
    assert slots()
    assert rpc.rpc_sync("worker1", slots_free)
    rpc.rpc_sync(f"worker{hidden}", set_dumpable, (0,))
    for _ in range(3):
        x = rpc.rpc_sync("worker1", add_one, (x,))
    return float(x.sum()) / LARGE


def hidden_from_the_start(rank: int) -> Any:
    become_nobody(dumpable=0)
    if rank:
        return None
    for _ in range(3):
        x = rpc.rpc_sync("worker1", add_one, (torch.zeros(LARGE),))
    return float(x.sum()) / LARGE, slots(), rpc.rpc_sync("worker1", slots_free)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@AS_ROOT
@pytest.mark.parametrize("hidden", [0, 1])
def test_a_process_that_hides_its_memory_sends_as_ever(hidden: int) -> None:
    """Caller or callee; nothing that it sends needs its memory any more."""
    assert run(hide_later, 2, hidden, env=ENV)[0] == 4


@AS_ROOT
def test_processes_that_cannot_open_each_others_memory_do_without() -> None:
    """Arguments and results arrive, and no slot is made."""
    assert run(hidden_from_the_start, 2, env=ENV)[0] == (1, [], [])


def large_too_late() -> torch.Tensor:
    _asked.wait(60)
    return torch.ones(LARGE)


_asked = threading.Event()


def answer_now() -> None:
    _asked.set()


def wait_for_slots(count: int) -> None:
    deadline = time.monotonic() + 60
    while len(slots()) != count or slots_mapped():
        assert time.monotonic() < deadline, (slots(), slots_mapped())
        time.sleep(0.02)


def late_reply(rank: int) -> None:
    if rank:
        return
    rpc.rpc_sync("worker1", slots_mapped)
    rpc.rpc_sync("worker1", slots_mapped)  # it knows now that its memory can be opened
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", large_too_late, timeout=0.3)
    rpc.rpc_sync("worker1", answer_now)
    rpc.rpc_sync("worker1", wait_until_filled)
    rpc.rpc_sync("worker1", shorten, (0.5,))
    rpc.rpc_sync("worker1", arm)
    rpc.rpc_sync("worker1", wait_for_slots, (0,))


def wait_until_filled() -> None:
    deadline = time.monotonic() + 60
    while [slot.is_free() for slot in slots()] != [False]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def arm() -> None:
    assert policy._pool is not None
    policy._pool.sweeper.arm()


def test_a_reply_after_its_callers_time_keeps_no_slot() -> None:
    """The caller drops it unseen; the memory is given back when the lease is over."""
    run(late_reply, 2, env=ENV)


def idle_slots(rank: int) -> Any:
    shorten(1)  # the worker's slot stays in use, by the reply that is kept here
    if rank:
        return None
    threads = set(threading.enumerate())
    for _ in range(3):
        x = rpc.rpc_sync("worker1", add_one, (torch.zeros(LARGE),))
    wait_for_slots(0)
    rpc.rpc_sync("worker1", wait_for_slots, (0,))
    left = [t.name for t in set(threading.enumerate()) - threads if t.name == "mmrpc-spool"]
    assert float(x.sum()) == LARGE
    return left, float(rpc.rpc_sync("worker1", add_one, (x,)).sum())


def test_idle_slots_are_given_back_by_both_sides() -> None:
    """Tensors on them stay what they are, no thread stays, and the next call makes a new slot."""
    assert run(idle_slots, 2, env=ENV)[0] == ([], 2 * LARGE)


def off(rank: int) -> None:
    if rank:
        return
    rpc.rpc_sync("worker1", slots_mapped)
    rpc.rpc_sync("worker1", keep, (torch.zeros(LARGE),))
    assert slots() == []


def test_it_can_be_turned_off() -> None:
    """With a threshold of 0 nothing goes through memory."""
    run(off, 2, env={"MMRPC_SHARE_ABOVE_BYTES": "0"})
