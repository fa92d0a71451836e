"""How agents that are started by hand find the launcher, and are let in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from mmrpc.errors import LaunchError
from mmrpc.launch import join, messages

Events = SimpleQueue[tuple[str, Any]]


@pytest.fixture
def port() -> int:
    """A port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def events() -> Events:
    """What the listener tells."""
    return SimpleQueue()


@pytest.fixture
def listener(port: int, events: Events) -> Iterator[join.Listener]:
    """One that waits for the agent of b, with the config `hash`."""
    listener = join.Listener(port, ["b"], "hash", events)
    yield listener
    listener.close()


def _connect(port: int, node: str = "b", config_hash: str = "hash") -> socket.socket:
    return join.connect("127.0.0.1", port, messages.Hello(node, config_hash), 30)


def _answer(connection: socket.socket) -> Any:
    connection.settimeout(30)
    with connection, connection.makefile("rb") as stream:
        return messages.decode(stream.readline())


@pytest.mark.usefixtures("listener")
def test_the_awaited_agent_is_let_in(port: int, events: Events) -> None:
    """The launcher gets the connection, and nothing of what follows the greeting is lost."""
    with _connect(port) as connection:
        connection.sendall(b"next\n")
        node, joined = events.get(timeout=30)
        with joined.connection, joined.from_agent:
            assert node == "b"
            assert joined.from_agent.readline() == b"next\n"


@pytest.mark.usefixtures("listener")
@pytest.mark.parametrize(
    ("node", "config_hash", "reason"),
    [
        ("c", "hash", "no agent of 'c' is awaited"),
        ("b", "other", "the launcher has another config"),
    ],
)
def test_others_are_sent_away_with_a_reason(
    port: int, events: Events, node: str, config_hash: str, reason: str
) -> None:
    """And the right one can still come."""
    answer = _answer(_connect(port, node, config_hash))
    assert isinstance(answer, messages.Refused)
    assert answer.reason.startswith(reason)
    with _connect(port):
        _, joined = events.get(timeout=30)
        joined.from_agent.close()
        joined.connection.close()


@pytest.mark.usefixtures("listener")
def test_a_second_agent_of_a_node_is_sent_away(port: int, events: Events) -> None:
    """Two people may have typed the same."""
    with _connect(port):
        _, joined = events.get(timeout=30)
        assert isinstance(_answer(_connect(port)), messages.Refused)
        joined.from_agent.close()
        joined.connection.close()


def test_an_agent_may_come_before_the_launcher(port: int, events: Events) -> None:
    """It tries again until the deadline."""
    found: list[socket.socket] = []
    thread = threading.Thread(target=lambda: found.append(_connect(port)))
    thread.start()
    listener = join.Listener(port, ["b"], "hash", events)
    _, joined = events.get(timeout=30)
    thread.join()
    for stream in (joined.from_agent, joined.connection, *found):
        stream.close()
    listener.close()


def test_nobody_there_is_told_at_the_deadline(port: int) -> None:
    """With the address and what to start."""
    with pytest.raises(LaunchError, match=r"no launcher at 127\.0\.0\.1") as caught:
        join.connect("127.0.0.1", port, messages.Hello("b", "hash"), 0.3)
    assert caught.value.hint == "Start `mmrpc launch` on the master's node."


def test_a_port_that_is_taken_is_told(port: int, events: Events) -> None:
    """Before anybody is waited for."""
    with (
        socket.create_server(("", port)),
        pytest.raises(LaunchError, match=f"cannot wait for agents on port {port}"),
    ):
        join.Listener(port, ["b"], "hash", events)
