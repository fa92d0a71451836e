"""A sender's slots: how many, for how long, and how large together."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from mmrpc.core import lease
from mmrpc.rpc.spool import slots
from mmrpc.rpc.spool.peers import Address
from mmrpc.rpc.spool.slots import Pool, Slot

MIB = 1 << 20


@pytest.fixture
def receiver():
    """A living process that never releases anything: this one."""
    return Address.own()


@pytest.fixture
def pool():
    pool = Pool(16 * MIB)
    yield pool
    pool.close()


def tensor(mib):
    return torch.zeros(mib * MIB, dtype=torch.uint8)


def descriptors():
    lease.memory_name()  # two belong to the process, for as long as it lives
    return len(os.listdir("/proc/self/fd"))


def release(slot):
    slot._control.released = slot._control.sent


def test_a_slot_that_nobody_uses_is_given_back(pool, receiver):
    """At the second sweep that finds it free; its descriptor and memory are gone."""
    before = descriptors()
    pool.put(tensor(1), receiver)
    (slot,) = pool._slots
    assert pool.sweep()
    release(slot)
    assert pool.sweep()
    pool.put(tensor(1), receiver)
    assert pool._slots == [slot]
    release(slot)
    assert pool.sweep()
    assert not pool.sweep()
    assert slot._control.retired
    del slot
    assert descriptors() == before


def test_a_slot_that_is_never_released_is_given_back(pool, receiver, monkeypatch):
    """After the time for which exported memory waits: its reply came after its caller's time."""
    pool.put(tensor(1), receiver)
    for _ in range(3):
        assert pool.sweep()
    monkeypatch.setattr(slots, "LEASE_S", 0.0)
    assert not pool.sweep()


def test_slots_that_are_being_filled_count(pool, receiver, monkeypatch):
    """Many threads at once get no more memory than one after the other."""
    filling, go_on = threading.Semaphore(0), threading.Event()
    fill = Slot.fill

    def fill_slowly(self, *args):
        filling.release()
        assert go_on.wait(30)
        return fill(self, *args)

    monkeypatch.setattr(Slot, "fill", fill_slowly)
    tickets = []
    threads = [
        threading.Thread(target=lambda: tickets.append(pool.put(tensor(4), receiver)))
        for _ in range(9)
    ]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert filling.acquire(timeout=30)
    for _ in range(200):
        if len(tickets) == 5:
            break
        threading.Event().wait(0.05)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert tickets.count(None) == 5
    assert sum(slot.nbytes for slot in pool._slots) == 16 * MIB
    assert pool._filling == []


def test_slots_leave_descriptors_to_others(receiver, monkeypatch):
    """Each slot keeps one, and a process has not many."""
    monkeypatch.setattr(slots, "_descriptors", lambda: 32)
    pool = Pool(1 << 30)
    tickets = [pool.put(tensor(1), receiver) for _ in range(6)]
    assert tickets[4:] == [None, None]
    assert all(tickets[:4])
    # One that is free makes room for one of another size.
    release(pool._slots[0])
    assert pool.put(tensor(8), receiver) is not None
    assert len(pool._slots) == 4
    pool.close()


def test_without_memory_or_descriptors_there_is_no_slot(pool, receiver, monkeypatch):
    """Then TensorPipe sends, and nothing is left counted."""

    def fail(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    assert pool.put(tensor(1), receiver) is None
    assert (pool._slots, pool._filling) == ([], [])


def test_a_copy_that_fails_costs_its_slot_only(pool, receiver, monkeypatch):
    """The error is the caller's, and the next one gets a slot."""

    def fail(*_):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "fill", fail)
        with pytest.raises(RuntimeError, match="no"):
            pool.put(tensor(1), receiver)
    assert (pool._slots, pool._filling) == ([], [])
    assert pool.put(tensor(1), receiver) is not None


def test_a_pool_that_closes_meanwhile_keeps_nothing(pool, receiver, monkeypatch):
    """What was being filled when the group ended goes with it."""
    fill = Slot.fill

    def fill_and_close(self, *args):
        ticket = fill(self, *args)
        pool.close()
        return ticket

    monkeypatch.setattr(Slot, "fill", fill_and_close)
    before = descriptors()
    pool.put(tensor(1), receiver)
    assert pool._slots == []
    assert descriptors() == before
