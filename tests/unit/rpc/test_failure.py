"""Exceptions on their way, without a network."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

from mmrpc import errors
from mmrpc.rpc.failure import Failure, RemoteTraceback


class TwoPartError(Exception):
    """Its constructor does not take its `args`."""

    def __init__(self, a: int, b: str) -> None:
        super().__init__(f"{a}/{b}")
        self.a, self.b = a, b


class MutedError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class ExitsWhenReadError(Exception):
    def __str__(self) -> str:
        raise SystemExit


class ClosedError(Exception):
    """No attribute of it can be read, not even by who prints its traceback."""

    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt


class _Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__module__", "__qualname__"):
            raise SystemExit
        return super().__getattribute__(name)


class NamelessError(Exception, metaclass=_Nameless):
    """Its class does not tell its name."""


class _Text(str):
    def __reduce__(self) -> Any:
        raise RuntimeError("not picklable")


class OddTextError(Exception):
    """Its text is a string that does not pickle."""

    def __str__(self) -> str:
        return _Text("odd")


class LyingError(Exception):
    """A copy of it says something else."""

    def __reduce__(self) -> Any:
        return LyingError, ("another text",)


class DeepError(Exception):
    """Recurses without end when it is pickled."""

    def __reduce__(self) -> Any:
        return DeepError, (self, DeepError("more"))


class ExitingError(Exception):
    """Wants to end the process when it is pickled."""

    def __reduce__(self) -> Any:
        raise SystemExit


def arrive(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        failure = Failure.of(raised)
    return failure.error(peer="w1", function="f", elapsed_s=0.5)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a", 2),
        KeyError("k"),
        OSError(2, "No such file", "/ü"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        StopIteration(3),
        TwoPartError(1, "\\x41 ü"),
        DeepError("its own pickling never ends"),
        ExitingError("its own pickling exits"),
        ExceptionGroup("several", [ValueError(1), TypeError("x")]),
        errors.NoSpaceError("full", path="/p", needed_bytes=5, free_bytes=1, node="n"),
        errors.RemoteError("r", peer="w2", type_name="t", text="x", traceback="tb"),
    ],
)
def test_an_exception_is_rebuilt(error: Exception) -> None:
    """With its class, text, arguments and attributes."""
    copy = arrive(error)
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    if not isinstance(error, ExceptionGroup):
        assert copy.args == error.args
        assert vars(copy) == vars(error)


def test_notes_come_along() -> None:
    """Those that were added on the way, too."""
    error = TwoPartError(1, "b")
    error.add_note("first")
    copy = arrive(error)
    copy.add_note("second")
    assert arrive(copy).__notes__ == ["first", "second"]


def test_tensors_in_an_exception_come_along() -> None:
    """They travel as tensors of a result do."""
    error = ValueError("bad batch")
    error.batch = torch.arange(3)  # type: ignore[attr-defined]
    assert arrive(error).batch.tolist() == [0, 1, 2]  # type: ignore[attr-defined]


def test_an_attribute_that_does_not_pickle_stays_behind() -> None:
    """The exception arrives without it."""
    error = TwoPartError(1, "b")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    copy = arrive(error)
    assert type(copy) is TwoPartError
    assert vars(copy) == {"a": 1, "b": "b"}


@pytest.mark.parametrize(
    ("error", "name", "text"),
    [
        (SystemExit(3), "SystemExit", "3"),
        (KeyboardInterrupt(), "KeyboardInterrupt", ""),
        (GeneratorExit("g"), "GeneratorExit", "g"),
        (type("HereError", (Exception,), {})("h"), f"{__name__}.HereError", "h"),
    ],
)
def test_what_cannot_be_rebuilt_is_told(error: BaseException, name: str, text: str) -> None:
    """As a RemoteError with type, text, traceback and call."""
    copy = arrive(error)
    assert type(copy) is errors.RemoteError
    assert (copy.type_name, copy.text) == (name, text)
    assert (copy.peer, copy.function, copy.elapsed_s) == ("w1", "f", 0.5)
    assert name.rpartition(".")[2] in copy.traceback


def test_an_exception_whose_text_cannot_be_read_arrives() -> None:
    """Whoever prints it there has the same trouble."""
    assert type(arrive(MutedError())) is MutedError


@pytest.mark.parametrize("cls", [ExitsWhenReadError, ClosedError, NamelessError, OddTextError])
def test_whatever_its_methods_do_an_exception_is_told(cls: type[Exception]) -> None:
    """Its caller gets an answer, with the name of its class, that pickles."""
    failure = Failure.of(cls("x"))
    assert failure.type_name == f"{__name__}.{type.__getattribute__(cls, '__name__')}"
    assert all(map(str, (failure.text, failure.traceback)))
    told = pickle.dumps((failure.type_name, failure.text, failure.traceback, failure.data))
    assert pickle.loads(told)[0] == failure.type_name


def test_a_copy_that_differs_is_not_taken_for_the_exception() -> None:
    """It is rebuilt without its own pickling, which loses the text."""
    copy = arrive(LyingError("the text"))
    assert type(copy) is LyingError
    assert str(copy) == "the text"


def test_data_that_does_not_unpickle_here_is_told() -> None:
    """The class may be missing on the node that asked."""
    failure = Failure("pkg.Error", "text", "Traceback ...", b"junk")
    error = failure.error(peer="w1", function="f", elapsed_s=None)
    assert type(error) is errors.RemoteError
    assert str(error) == "f() on w1: it raised pkg.Error: text"


def test_the_remote_traceback_is_the_cause_and_says_where() -> None:
    """It is printed with the exception."""
    cause = arrive(ValueError("x")).__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "in arrive" in str(cause)
