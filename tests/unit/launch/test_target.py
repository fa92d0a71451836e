"""What a role runs, told apart from its text."""

from __future__ import annotations

import pytest

from mmrpc.errors import ConfigError
from mmrpc.launch.target import parse


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("train:main", "function", ("train", "main")),
        ("pkg.sub.train:Trainer.run", "function", ("pkg.sub.train", "Trainer.run")),
        ("train.py", "script", ("train.py",)),
        ("/srv/jobs/a.b/train.py", "script", ("/srv/jobs/a.b/train.py",)),
        ("'/srv/my jobs/train.py'", "script", ("/srv/my jobs/train.py",)),
        ("python train.py", "command", ("python", "train.py")),
        ("sh -c 'echo $RANK; exit 3'", "command", ("sh", "-c", "echo $RANK; exit 3")),
        ("./run.sh", "command", ("./run.sh",)),
        ("C:run", "function", ("C", "run")),
        ("1st:main", "command", ("1st:main",)),
        ("train:main now", "command", ("train:main", "now")),
    ],
)
def test_kinds(text: str, kind: str, words: tuple[str, ...]) -> None:
    """A colon between identifiers is a function, a single ``.py`` a script, all else a command."""
    found = parse(text)
    assert (found.kind, found.words) == (kind, words)


def test_words_are_taken_as_they_are() -> None:
    """A list needs no splitting and no quotes."""
    assert parse(["echo", "a b"]).words == ("echo", "a b")


@pytest.mark.parametrize("text", ["", "   ", []])
def test_nothing_is_no_target(text: str | list[str]) -> None:
    """The error says what a target can be."""
    with pytest.raises(ConfigError, match="module:function"):
        parse(text)


def test_an_open_quote_is_told() -> None:
    """The command is in the error."""
    with pytest.raises(ConfigError, match="cannot split the command"):
        parse("sh -c 'echo")


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("train:main", ["py", "-m", "mmrpc.launch.worker", "train:main", "--lr", "1"]),
        ("train.py", ["py", "train.py", "--lr", "1"]),
        ("echo hi", ["echo", "hi", "--lr", "1"]),
    ],
)
def test_the_command_line_ends_with_the_arguments(text: str, argv: list[str]) -> None:
    """Functions and scripts run under the node's interpreter."""
    assert parse(text).argv("py", ["--lr", "1"]) == argv
