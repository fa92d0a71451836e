"""Futures whose exceptions keep class and attributes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mmrpc import errors
from mmrpc.rpc.futures import Future, collect_all, new_future, wait_all


def failure() -> errors.ConfigError:
    return errors.ConfigError("bad", key="k")


def failed() -> Future[Any]:
    future = new_future()
    future.set_exception(failure())
    return future


def done(value: Any) -> Future[Any]:
    future = new_future()
    future.set_result(value)
    return future


def test_a_future_is_one_of_torchs() -> None:
    """Programs and torch itself ask for that."""
    assert isinstance(new_future(), torch.futures.Future)
    assert isinstance(new_future(), torch._C.Future)


@pytest.mark.parametrize("read", ["wait", "value"])
def test_an_exception_is_raised_as_it_was_set(read: str) -> None:
    """By wait and by value, any number of times."""
    future = failed()
    for _ in range(2):
        with pytest.raises(errors.ConfigError) as caught:
            getattr(future, read)()
        assert caught.value.key == "k"


class MutedError(Exception):
    def __str__(self) -> str:
        raise self.args[0]


@pytest.mark.parametrize("broken", [ValueError("no text"), SystemExit(1)])
def test_an_exception_without_a_text_completes_the_future(broken: BaseException) -> None:
    """Nobody is left waiting because an error cannot be told."""
    future = new_future()
    future.set_exception(MutedError(broken))
    with pytest.raises(MutedError):
        future.wait()


def test_then_gives_what_the_callback_returns() -> None:
    """Chained, before and after the future is done."""
    first = new_future()
    last = first.then(lambda future: future.wait() + 1).then(lambda future: future.value() * 2)
    first.set_result(3)
    assert last.wait() == 8
    assert first.then(lambda future: future.value()).wait() == 3


def test_then_keeps_the_exception_of_a_callback() -> None:
    """Whether it comes from the future or from the callback itself."""

    def fail(_: Any) -> None:
        raise failure()

    for future in (failed().then(lambda f: f.wait()).then(lambda f: f.value()), done(1).then(fail)):
        with pytest.raises(errors.ConfigError) as caught:
            future.wait()
        assert caught.value.key == "k"


def test_a_callback_that_exits_does_not_leave_waiters_behind() -> None:
    """The future that then returned has an error."""

    def leave(_: Any) -> None:
        raise SystemExit(2)

    with pytest.raises(errors.RpcError, match="SystemExit"):
        done(1).then(leave).wait()


def test_callbacks_get_the_future_with_its_exception() -> None:
    """From another thread, and if nobody else holds the future any more."""
    seen: list[Any] = []
    came = threading.Event()

    def look(future: Any) -> None:
        try:
            future.value()
        except errors.ConfigError as error:
            seen.append(error.key)
        came.set()

    future = new_future()
    future.add_done_callback(look)
    thread = threading.Thread(target=future.set_exception, args=(failure(),))
    del future
    thread.start()
    assert came.wait(30)
    thread.join(30)
    assert seen == ["k"]


@pytest.mark.parametrize("module", [torch.futures, None])
def test_wait_all_gives_values_and_raises_exceptions(module: Any) -> None:
    """torch's own function too: a failure among many is not taken for a value."""
    wait, collect = (module.wait_all, module.collect_all) if module else (wait_all, collect_all)
    assert wait([done(1), done(2)]) == [1, 2]
    assert [future.value() for future in collect([done(1), done(2)]).wait()] == [1, 2]
    for call in (
        lambda: wait([done(1), failed()]),
        lambda: collect([failed(), done(1)]).wait(),
        lambda: collect([failed(), done(1)]).value(),
    ):
        with pytest.raises(errors.ConfigError) as caught:
            call()
        assert caught.value.key == "k"
