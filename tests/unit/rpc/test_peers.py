"""What workers tell each other of themselves: all of it once, and then their name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mmrpc.rpc import torchrpc
from mmrpc.rpc.spool import peers, policy
from mmrpc.rpc.spool.peers import Address

OTHER = Address("elsewhere", "elsewhere", 7, 70)


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a worker of the name w0."""
    monkeypatch.setattr(torchrpc, "own_name", lambda: "w0")
    policy.configure()
    yield
    policy.close()


def test_a_worker_is_introduced_until_it_is_known() -> None:
    """The answer to a call says that what the call told has arrived."""
    told = peers.introduce("w1")
    assert told == ("w0", Address.own())
    assert peers.introduce("w1") == told
    peers.learn("w1", OTHER, told=told)
    assert peers.introduce("w1") == "w0"


def test_a_worker_that_can_be_opened_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: after the first answer, which says where it is."""
    monkeypatch.setattr(Address, "can_be_opened", lambda self: True)
    peers.learn("w1", OTHER, told=peers.introduce("w1"))
    told = peers.introduce("w1")
    assert told == ("w0", Address.own()._replace(opens=True))
    peers.learn("w1", OTHER, told=told)
    assert peers.introduce("w1") == "w0"


def test_a_worker_that_forgot_is_told_again() -> None:
    """Another process can have its name in a later group."""
    peers.learn("w1", OTHER, told=peers.introduce("w1"))
    peers.learn("w1", OTHER._replace(pid=8), told="w0")
    assert peers.introduce("w1") == ("w0", Address.own())
    assert peers.address_of("w1") == OTHER._replace(pid=8)


def test_what_a_worker_may_open_is_not_forgotten() -> None:
    """A message to nobody in particular does not say it."""
    peers.learn("w1", OTHER._replace(opens=True))
    peers.learn("w1", OTHER)
    assert peers.address_of("w1") == OTHER._replace(opens=True)


def test_a_caller_is_met_once_and_then_known_by_name() -> None:
    """It is answered with where this process is, until it says its name only."""
    assert peers.meet(("w1", OTHER)) == (OTHER, Address.own())
    assert peers.meet("w1") == (OTHER, None)


def test_a_name_that_is_not_known_is_answered_with_an_introduction() -> None:
    """So that the caller introduces itself."""
    assert peers.meet("w9") == (None, Address.own())


def test_nothing_is_told_where_slots_are_off() -> None:
    """Nor asked."""
    policy.configure(0)
    assert peers.introduce("w1") is None
    assert peers.meet(None) == (None, None)
