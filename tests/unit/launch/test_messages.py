"""What launcher and agent tell each other, as lines."""

from __future__ import annotations

from typing import Any

import pytest

from mmrpc.launch import messages

EVERY = [
    messages.Setup({"name": "x"}, "a", "1", "run", ["--lr", "ü"], "/cwd", check_only=True),
    messages.Refused("no"),
    messages.Listen(),
    messages.Start(2, "10.0.0.1", 29500),
    messages.Stop(1.5),
    messages.Kill(),
    messages.Forget(),
    messages.Hello("a", "hash"),
    messages.Ready("host", "/bin/python", [["reason", "hint"]]),
    messages.Listening(29500),
    messages.Started({"w0": 12}),
    messages.Exited("w0", -9, 1.25, "/logs/stderr.log", ["a", "b"]),
    messages.Line("w0", "stderr", "text with \x1e and \n and \udcff"),
    messages.Stopped({"12": "python"}),
    messages.Failed("reason", "hint"),
    messages.Beat(),
    messages.Status({"state": "running"}),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_a_message_survives_as_one_line(message: Any) -> None:
    """Whatever is in it, there is one newline, and it is the last byte."""
    line = messages.encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert messages.decode(line) == message


def test_every_message_is_tested() -> None:
    """A new message has to be added above."""
    assert {type(message) for message in EVERY} == set(messages._TYPES.values())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"Welcome to b\n",
        b'{"is": "Kill"}\n',
        b"\x1e\n",
        b"\x1enot json\n",
        b"\x1e[]\n",
        b'\x1e{"is": "Nothing"}\n',
        b'\x1e{"is": "Stop"}\n',
        b'\x1e{"is": "Kill", "more": 1}\n',
        b"\x1e\xff\n",
    ],
)
def test_what_is_no_message_is_none(line: bytes) -> None:
    """A login shell's words, a cut line or a stranger's do no harm."""
    assert messages.decode(line) is None
