"""The list of who is there, and the meeting of ranks over one store."""

from __future__ import annotations

import threading

import pytest

from mmrpc.errors import HandshakeError
from mmrpc.rpc import rollcall
from mmrpc.rpc.rendezvous import Endpoint
from mmrpc.rpc.rollcall import Hello, Roll
from mmrpc.testing import free_port

PLACE = Endpoint("host", 5)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def hello(rank, world_size=3, worker=None):
    return Hello(rank, world_size, worker or f"w{rank}", f"process {rank}")


def meet_in_threads(port, *ranks, world_size, timeout_s=60.0):
    """What each rank found: a store or an error."""
    found = {}

    def run(rank):
        try:
            place = Endpoint("127.0.0.1", port)
            found[rank] = rollcall.meet(place, f"w{rank}", rank, world_size, timeout_s)
        except HandshakeError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(80)
    return [found[rank] for rank in ranks]


def test_a_roll_is_complete_when_each_rank_came_once():
    """In any order."""
    roll = Roll(3)
    assert [roll.add(hello(rank)) for rank in (2, 0)] == [None, None]
    assert not roll.is_complete
    assert roll.add(hello(1)) is None
    assert roll.is_complete


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (hello(0), "two processes have rank 0: process 0 and process 0"),
        (hello(1, worker="w0"), "rank 1 has the name 'w0', as rank 0 does"),
        (hello(1, 2), "rank 1 expects 2 workers, and rank 0 expects 3"),
        (hello(3), "rank 3 is not below the world size, 3"),
        (hello(-1), "rank -1 is not below the world size, 3"),
    ],
)
def test_what_cannot_be_in_one_group_is_found(second, reason):
    """The first thing that is wrong, as one clause."""
    roll = Roll(3)
    assert roll.add(hello(0)) is None
    finding = roll.add(second)
    assert finding is not None
    assert finding.reason == reason
    assert finding.error().rank == second.rank


@pytest.mark.parametrize(
    ("world_size", "who"),
    [
        (2, "rank 1 of 2"),
        (3, "ranks 1 and 2 of 3"),
        (4, "ranks 1, 2 and 3 of 4"),
        (100, "ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20"
         " and 79 more of 100"),
    ],
)  # fmt: skip
def test_the_absent_are_named(world_size, who):
    """In order, and not a thousand of them."""
    roll = Roll(world_size)
    roll.add(hello(0, world_size))
    finding = roll.absent(5, PLACE)
    assert finding.reason == f"{who} did not come within 5 s"
    assert "host:5" in finding.hint


def test_after_a_failure_the_ranks_can_meet_again():
    """Also with processes that were not in the first attempt, as after a restart."""
    port = free_port()
    first = meet_in_threads(port, 0, 1, world_size=3, timeout_s=1)
    assert {str(error) for error in first} == {str(first[0])}
    assert "rank 2 of 3 did not come" in str(first[0])
    again = meet_in_threads(port, 0, 1, 2, world_size=3)
    assert not [error for error in again if isinstance(error, HandshakeError)]


def test_a_store_that_lasts_tells_one_group_from_the_next(monkeypatch):
    """Who comes again before it knows that the first group is over would meet nobody."""
    monkeypatch.setattr(rollcall, "_groups", 0)
    port = free_port()
    first = meet_in_threads(port, 0, 1, world_size=2)
    late = meet_in_threads(port, 1, world_size=2)[0]
    assert "came to a group that is complete" in str(late)
    rollcall.begun()
    second = meet_in_threads(port, 0, 1, world_size=2)
    assert not [error for error in (*first, *second) if isinstance(error, HandshakeError)]
