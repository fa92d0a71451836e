"""Calls that may hang."""

from __future__ import annotations

import threading

import pytest

from mmrpc.paths.deadline import Deadline


def test_results_and_exceptions_come_through() -> None:
    """In time, the call is like any other."""
    deadline = Deadline(30)
    assert deadline.call(lambda: 7) == 7
    with pytest.raises(KeyError, match="x"):
        deadline.call(lambda: {}["x"])


def test_none_is_a_result() -> None:
    """A call that gives nothing has still been answered."""
    assert Deadline(30).call(lambda: None) is None


def test_a_hanging_call_is_given_up_and_its_late_result_undone() -> None:
    """The caller goes on at the deadline; what the call then holds is given back."""
    answer, undone = threading.Event(), threading.Event()
    late: list[str] = []

    def undo(result: str) -> None:
        late.append(result)
        undone.set()

    def call() -> str:
        answer.wait()
        return "descriptor"

    deadline = Deadline(0.05)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        deadline.call(call, undo=undo)
    answer.set()
    assert undone.wait(30)
    assert late == ["descriptor"]


def test_while_one_hangs_others_fail_at_once() -> None:
    """A dead mount costs one thread, not one per reference; when it answers, calls go on."""
    answer, answered = threading.Event(), threading.Event()
    deadline = Deadline(0.05)

    def call() -> None:
        answer.wait()
        answered.set()

    with pytest.raises(TimeoutError):
        deadline.call(call)
    threads = threading.active_count()
    for _ in range(100):
        with pytest.raises(TimeoutError, match="earlier call"):
            deadline.call(lambda: 1)
    assert threading.active_count() == threads
    answer.set()
    assert answered.wait(30)
    for thread in threading.enumerate():
        if thread.name == "mmrpc-deadline":
            thread.join(30)
    assert Deadline(30).call(lambda: 1) == 1
    deadline.timeout_s = 30
    assert deadline.call(lambda: 1) == 1
