"""Messages over a store: in order, once, and with deadlines."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from mmrpc.rpc.handshake.board import Board
from mmrpc.rpc.handshake.messages import Expired, Probed, ProbeTask, Verdict, WriteTask


@pytest.fixture(params=["memory", "tcp"])
def store(request):
    if request.param == "memory":
        return HashStore()
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))


def test_what_is_posted_is_taken_in_order(store):
    """The coordinator takes what came, in the order in which it came."""
    board = Board(store, "x/")
    messages = [Probed(rank=rank, mounts=()) for rank in (3, 1, 2)]
    for message in messages:
        board.post(message)
    board.post(Expired())
    taker = Board(store, "x/")
    assert [taker.take() for _ in range(4)] == [*messages, Expired()]


def test_each_rank_hears_its_own(store):
    """What one rank is told is heard by it, in order, also when it comes late."""
    teller = Board(store, "x/")
    teller.tell(0, ProbeTask())
    teller.tell(1, WriteTask(mounts=("a",)))
    teller.tell(0, Verdict(present=2, coordinator="w0"))
    board = Board(store, "x/")
    assert board.hear(0, 5) == ProbeTask()
    assert board.hear(0, 5) == Verdict(present=2, coordinator="w0")
    assert Board(store, "x/").hear(1, 5) == WriteTask(mounts=("a",))


def test_silence_ends():
    """Who hears nothing in time gets a TimeoutError."""
    with pytest.raises(TimeoutError, match=r"no x/out/0/1 within"):
        Board(HashStore(), "x/").hear(0, 0.05)


def test_prefixes_keep_groups_apart(store):
    """What belongs to one handshake is not seen in another on the same store."""
    Board(store, "x/").tell(0, ProbeTask())
    Board(store, "y/").tell(0, WriteTask(mounts=()))
    assert Board(store, "y/").hear(0, 5) == WriteTask(mounts=())


def test_the_last_reader_is_noticed():
    """Whoever hosts the store knows when all who are there have read the verdict."""
    store = HashStore()
    waiter = Board(store, "x/")
    assert not waiter.wait_until_read(0.01)
    done = []
    thread = threading.Thread(target=lambda: done.append(waiter.wait_until_read(30)))
    thread.start()
    for _ in range(3):
        Board(store, "x/").acknowledge(3)
    thread.join(30)
    assert done == [True]
