"""From what was seen of a failure to the sentence that tells it."""

from __future__ import annotations

import errno
import pickle
import signal
from typing import Any

import pytest

from mmrpc.config import ClusterConfig, parse_config
from mmrpc.errors import LaunchError
from mmrpc.launch import causes, messages
from mmrpc.launch.channel import Ended

TRACEBACK = "Traceback (most recent call last):"


def _cluster(via: str, **node: Any) -> ClusterConfig:
    return parse_config(
        {
            "nodes": {"b": node},
            "roles": {"w": {"target": "job:main", "workers": {"b": 1}}},
            "launch": {"via": via},
        }
    )


@pytest.mark.parametrize(
    ("exit_code", "code", "how"),
    [
        (7, 7, "exit code 7"),
        (-9, 137, "killed by SIGKILL"),
        (-7, 135, "killed by SIGBUS"),
        (-63, 191, "killed by signal 63"),
    ],
)
def test_a_worker_gives_its_code(exit_code: int, code: int, how: str) -> None:
    """128 + the signal, as a shell has it."""
    event = messages.Exited("w1", exit_code, 1.25, "/l/stderr.log", ["one", "two"])
    error = causes.worker_failed("b", event)
    assert (error.worker, error.node, error.exit_code) == ("w1", "b", code)
    assert str(error).startswith(f"on b: worker w1 failed: {how} after 1.2 s")
    assert causes.screen(error).splitlines()[-3:] == [
        "the end of /l/stderr.log:",
        "  | one",
        "  | two",
    ]
    assert causes.screen(pickle.loads(pickle.dumps(error))) == causes.screen(error)


@pytest.mark.parametrize(
    ("last", "is_one"),
    [
        ("mmrpc.errors.PeerLostError: shutdown() on w0: it ended", True),
        ("ValueError: PeerLostError", False),
    ],
)
def test_a_worker_that_lost_another_fails_in_consequence(last: str, is_one: bool) -> None:
    """Told by the error that its log ends with; what torch's threads add may stand behind."""
    tail = ["Traceback (most recent call last):", last, "[W1] RPC agent for w1 is shutting down"]
    assert causes.is_consequence(messages.Exited("w1", 1, 0.0, "/l", tail)) == is_one


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (["up", TRACEBACK, '  File "x"', "    f()", "E: one", "two"], 2),
        ([TRACEBACK, "  a", "A: 1", "", "During ...:", "", TRACEBACK, "  b", "B: 2"], 1),
        (["one", "two"], 1),
        ([TRACEBACK, "  cut"], 1),
    ],
)
def test_what_was_shown_is_not_shown_again(tail: list[str], words: int) -> None:
    """Of a worker on the console the report repeats the exception alone, or the last line."""
    error = causes.worker_failed("b", messages.Exited("w1", 1, 0.0, "/l", tail), is_shown=True)
    quoted = [f"  | {line}" for line in tail[-words:]]
    assert causes.screen(error).splitlines()[1:] == ["the end of /l:", *quoted]


def test_a_silent_worker_is_said_to_be_silent() -> None:
    """An empty log is worth a word."""
    error = causes.worker_failed("b", messages.Exited("w1", 1, 0.0, "/l/stderr.log", []))
    assert causes.screen(error).endswith("/l/stderr.log is empty")


@pytest.mark.parametrize(
    ("via", "ended", "was_ready", "code", "text"),
    [
        ("local", Ended(-9, []), True, 137, "the agent ended: killed by SIGKILL"),
        ("local", Ended(0, []), True, 1, "the agent ended: exit code 0"),
        ("local", Ended(1, ["No module named mmrpc"]), False, 1, "cannot start the agent"),
        ("ssh", Ended(255, []), True, 255, "the ssh connection was lost"),
        ("ssh", Ended(255, ["refused"]), False, 255, "the ssh connection failed"),
        ("ssh", Ended(127, []), False, 127, "cannot run 'py3': there is no such program"),
        ("ssh", Ended(126, []), False, 126, "cannot run 'py3': it is not executable"),
        ("ssh", Ended(-9, []), True, 137, "the agent or its ssh ended: killed by SIGKILL"),
        ("slurm", Ended(1, ["srun: error"]), True, 1, "the agent or its srun ended"),
        ("manual", Ended(None, []), True, 1, "the connection to the agent was lost"),
    ],
)
def test_an_agent_that_ended_is_told_by_the_way_to_it(
    via: str, ended: Ended, was_ready: bool, code: int, text: str
) -> None:
    """A wrong interpreter, a refused connection and a killed process are different things."""
    error = causes.agent_ended("b", ended, _cluster(via, python="py3"), was_ready)
    assert text in error.reason
    assert (error.node, error.exit_code, error.worker) == ("b", code, None)
    assert all(line in causes.screen(error) for line in ended.stderr_tail)


def test_absent_nodes_are_named() -> None:
    """One is the error's node; several are all in its reason."""
    one, two = causes.absent(["b"], 60), causes.absent(["b", "c"], 60)
    assert (one.node, two.node) == ("b", None)
    assert two.reason == "no answer within 60 s from the agents of b, c"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGPIPE])
def test_a_signal_is_128_and_its_number(number: signal.Signals) -> None:
    """As for any program."""
    error = causes.interrupted(number)
    assert (str(error), error.exit_code) == (f"ended by {number.name}", 128 + number)


def test_a_program_that_is_missing_here_says_what_needs_it() -> None:
    """ssh itself, or the interpreter of a node on this machine."""
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")
    ssh = causes.cannot_run("b", "ssh", missing, _cluster("ssh"))
    assert (ssh.exit_code, ssh.hint) == (127, "launch.via: ssh needs it.")
    python = causes.cannot_run("b", "/p", PermissionError(13, "x"), _cluster("local"))
    assert (python.exit_code, python.hint) == (126, "Mend nodes.b.python.")


def test_all_problems_are_told_at_once() -> None:
    """The first is the error, the others are its notes, by node."""
    causes.raise_problems({"a": [], "b": []})
    with pytest.raises(LaunchError) as caught:
        causes.raise_problems({"a": [["one", "Mend one."]], "b": [["two", "Mend two."]]})
    assert causes.screen(caught.value) == "on a: one. Mend one.\non b: two. Mend two."


def test_survivors_are_listed_by_pid() -> None:
    """Whoever reads it has to look at them by hand."""
    text = causes.survivors("b", {"12": "python train.py"})
    assert text.splitlines()[-1] == "  12 python train.py"
