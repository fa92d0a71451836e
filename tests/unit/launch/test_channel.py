"""The launcher's end of a channel, with small programs in place of an agent."""

from __future__ import annotations

import os
import signal
import socket
import sys
from queue import SimpleQueue
from typing import Any

import pytest

from mmrpc.launch import messages
from mmrpc.launch.channel import Channel, Ended, Noise, ProcessChannel, SocketChannel

_ECHO = (
    "import sys\n"
    "print('Welcome', flush=True)\n"
    "print('careful', file=sys.stderr, flush=True)\n"
    "for line in sys.stdin.buffer:\n"
    "    sys.stdout.buffer.write(line)\n"
    "    sys.stdout.buffer.flush()\n"
    "sys.exit(3)\n"
)
_DEAF = "import signal, time\nprint('up', flush=True)\nwhile True: signal.pause()\n"
Events = SimpleQueue[tuple[str, Any]]


def _start(program: str) -> tuple[ProcessChannel, Events]:
    events: Events = SimpleQueue()
    return ProcessChannel("b", events, [sys.executable, "-c", program]), events


def _next(events: Events) -> Any:
    node, event = events.get(timeout=60)
    assert node == "b"
    return event


def test_messages_and_noise_come_through_one_queue() -> None:
    """What the program prints besides is told as such; its end and exit code come last."""
    channel, events = _start(_ECHO)
    channel.send(messages.Stop(1.5))
    seen = {_next(events) for _ in range(3)}
    assert seen == {Noise("Welcome"), Noise("careful"), messages.Stop(1.5)}
    assert channel.close(60)
    assert _next(events) == Ended(3, ["careful"])
    assert events.empty()


def test_a_program_that_does_not_end_is_killed() -> None:
    """`close` says so."""
    channel, events = _start(_DEAF)
    assert _next(events) == Noise("up")
    assert not channel.close(0.1)
    assert _next(events) == Ended(-signal.SIGKILL, [])


def test_what_is_sent_to_the_dead_is_dropped() -> None:
    """Its end is told by the queue, in order, not by an exception somewhere else."""
    channel, events = _start("raise SystemExit(5)")
    assert _next(events) == Ended(5, [])
    for _ in range(2):
        channel.send(messages.Kill())
    assert channel.close(60)
    channel.send(messages.Kill())


def test_a_program_that_cannot_be_run_is_an_os_error() -> None:
    """Nothing is left behind by the attempt."""
    with pytest.raises(FileNotFoundError):
        ProcessChannel("b", SimpleQueue(), ["/nope/python"])


def test_the_program_does_not_get_our_signals() -> None:
    """Ctrl-C at the terminal goes to the launcher's session, and it is in another."""
    program = "import os\nprint(os.getsid(0) == os.getpid(), flush=True)\n"
    channel, events = _start(program)
    assert _next(events) == Noise("True")
    assert channel.close(60)


def _pair() -> tuple[Channel, Events, socket.socket]:
    ours, theirs = socket.socketpair()
    events: Events = SimpleQueue()
    return SocketChannel("b", events, ours, ours.makefile("rb")), events, theirs


def test_a_connection_is_a_channel_as_well() -> None:
    """It has no exit code to tell."""
    channel, events, agent = _pair()
    with agent, agent.makefile("rb") as stream:
        channel.send(messages.Stop(2))
        assert messages.decode(stream.readline()) == messages.Stop(2)
        agent.sendall(messages.encode(messages.Started({"w0": 1})) + b"noise\n")
        assert _next(events) == messages.Started({"w0": 1})
        assert _next(events) == Noise("noise")
        agent.shutdown(socket.SHUT_WR)
        assert _next(events) == Ended(None, [])
        assert channel.close(60)
        assert stream.read() == b""


def test_an_agent_that_keeps_its_connection_is_cut_off() -> None:
    """`close` waits, and then does not."""
    channel, events, agent = _pair()
    with agent:
        assert not channel.close(0.1)
        assert _next(events) == Ended(None, [])


def test_no_descriptor_is_left() -> None:
    """A thousand launches in one process do not run out of them."""
    before = len(os.listdir("/proc/self/fd"))
    channel: Channel
    for _ in range(3):
        channel, events = _start("")
        assert channel.close(60)
        assert isinstance(_next(events), Ended)
        channel, events, agent = _pair()
        agent.close()
        assert channel.close(60)
    assert len(os.listdir("/proc/self/fd")) == before
