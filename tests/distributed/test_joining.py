"""Groups without a cluster's config that do not come about: typed, named, and in time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch._C._distributed_c10d import TCPStore

from mmrpc import errors
from mmrpc.testing import free_port
from tests.distributed.joining import (
    IN,
    FewDescriptors,
    Joiner,
    as_rank,
    die_after_meeting,
    join,
    reasons,
    stop_after_meeting,
)


def test_all_are_in_when_all_are_there() -> None:
    """Whichever comes first."""
    assert join(as_rank(2, 3), as_rank(0, 3), as_rank(1, 3)) == [IN] * 3


def test_absent_ranks_are_named_by_all_that_came() -> None:
    """At the deadline, and by the same error."""
    found = join(as_rank(0, 4), as_rank(2, 4), timeout_s=2)
    (reason,) = reasons(found)
    assert reason.startswith("ranks 1 and 3 of 4 did not come within 2 s. Look at the logs")
    assert {one.cls for one in found} == {errors.HandshakeError}
    assert {one.rank for one in found} == {1}


def test_an_absent_rank_0_is_named() -> None:
    """It is the one that the others would have met at."""
    (found,) = join(as_rank(1, 2), timeout_s=1)
    assert found.cls is errors.HandshakeError
    assert "rank 1 cannot reach rank 0 at 127.0.0.1:" in found.message
    assert "connection refused for 1 s" in found.message
    assert found.rank == 0


@pytest.mark.parametrize(
    ("second", "third", "text"),
    [
        ((1, 3), (1, 3, "other"), "two processes have rank 1: process "),
        ((1, 3), (2, 3, "w1"), " has the name 'w1', as rank "),
        ((1, 3), (2, 4), "rank 2 expects 4 workers, and rank 0 expects 3"),
        ((1, 3), (3, 3), "rank 3 is not below the world size, 3"),
    ],
)
def test_workers_that_do_not_fit_together_fail_at_once(
    second: tuple[int, int], third: tuple[int, int], text: str
) -> None:
    """Every rank that came says which, and why, long before the deadline."""
    found = join(as_rank(0, 3), as_rank(*second), as_rank(*third))
    (reason,) = reasons(found)
    assert text in reason
    assert {one.cls for one in found} == {errors.HandshakeError}


def test_a_rank_that_comes_to_a_complete_group_is_told() -> None:
    """The group goes on; the one too many fails at once."""
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "MMRPC_INIT_TIMEOUT_S": "60",
    }
    first, second = Joiner(0, 2, env=env), Joiner(1, 2, env=env)
    late = None
    try:
        assert [first.found(), second.found()] == [IN, IN]
        late = Joiner(1, 2, env={**env, "MMRPC_INIT_TIMEOUT_S": "1"})
        found = late.found()
        assert found.cls is errors.HandshakeError
        # It depends on whether the process of rank 0 is gone by now.
        assert "group that is complete" in found.message or "cannot reach" in found.message
    finally:
        for joiner in filter(None, (first, second, late)):
            joiner.close()


def test_a_second_rank_0_is_told() -> None:
    """It cannot have the port, and the other one waits for a rank that never comes."""
    found = join(as_rank(0, 2, "a"), as_rank(0, 2, "b"), timeout_s=5)
    texts = sorted(one.message for one in found)
    assert "Is another process rank 0 as well?" in texts[0]
    assert texts[1].startswith("rank 1 of 2 did not come within 5 s")


def test_two_rank_0_at_an_agents_store_are_told() -> None:
    """Both come to a store that neither hosts."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = join(
        as_rank(0, 2, "a"),
        as_rank(0, 2, "b"),
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    (reason,) = reasons(found)
    assert "two processes have rank 0" in reason


def test_an_agents_store_serves_as_well() -> None:
    """As torchrun has it; rank 0 is only one of its clients."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = join(
        as_rank(0, 2),
        as_rank(1, 2),
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    assert found == [IN, IN]


def test_a_master_that_has_no_address_is_told() -> None:
    """By every rank, since each looks it up."""
    found = join(as_rank(0, 2), as_rank(1, 2), timeout_s=1, MASTER_ADDR="no-such-host.invalid")
    assert {one.cls for one in found} == {errors.HandshakeError}
    assert "master's host 'no-such-host.invalid'" in found[0].message
    assert "at no-such-host.invalid:" in found[1].message


@contextlib.contextmanager
def listener(kind: str) -> Iterator[int]:
    """Something that listens and is no store."""
    kept = []

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                if kind == "silent":
                    kept.append(client)
                    continue
                if kind == "talks":
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100)
                client.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for client in kept:
        client.close()


@pytest.mark.parametrize("kind", ["closes", "talks", "silent"])
def test_a_port_that_something_else_has_is_told(kind: str) -> None:
    """Whatever it does when it is connected to: close, talk, or say nothing."""
    with listener(kind) as port:
        first, second = join(as_rank(0, 2), as_rank(1, 2), timeout_s=2, MASTER_PORT=str(port))
    assert first.cls is second.cls is errors.HandshakeError
    assert f"rank 0 cannot listen on port {port}: another program does" in first.message
    assert "what answers there is no store of torch's" in second.message


@pytest.mark.parametrize("lose", [die_after_meeting, stop_after_meeting])
def test_a_worker_that_is_lost_while_rpc_begins_is_told(lose: Callable[[], None]) -> None:
    """It dies or stands still between the roll call and torch's own start."""
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "MMRPC_INIT_TIMEOUT_S": "5",
    }
    lost = Joiner(1, 3, env=env, first=lose)
    others = [Joiner(rank, 3, env=env) for rank in (0, 2)]
    try:
        for one in [joiner.found() for joiner in others]:
            assert one.cls is errors.HandshakeError
            assert "lost another worker while RPC began" in one.message
    finally:
        for joiner in (lost, *others):
            joiner.close()


def test_an_interrupt_ends_the_wait() -> None:
    """On both sides of it; nobody waits until the deadline."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    joiners = [Joiner(rank, 3, env=env) for rank in (0, 1)]
    try:
        time.sleep(0.5)  # wherever in it they are then
        for joiner in joiners:
            joiner.interrupt()
        assert {joiner.found().cls for joiner in joiners} == {KeyboardInterrupt}
    finally:
        for joiner in joiners:
            joiner.close()


@pytest.mark.parametrize("spare", [1, 3, 6, 9, 12, 15])
def test_a_worker_with_too_few_descriptors_says_so(spare: int) -> None:
    """Wherever it runs out of them; the other one does not wait for it for ever.

    With fewer than a store needs, torch does not always tell what it lacked.
    """
    first, second = join(as_rank(0, 2, first=FewDescriptors(spare)), as_rank(1, 2), timeout_s=5)
    assert first.cls is second.cls is errors.HandshakeError
    assert "too many open files" in first.message.lower() or spare <= 6
