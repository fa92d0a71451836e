"""Calls, results and exceptions between two workers."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.rpc

from mmrpc import MemoryMappedTensor, errors, rpc
from tests.distributed.workers import by_every_way, outcome, run

TEXT = "nä 数 \\x41 \\N \n\t'\"{}%s"


class TwoPartError(Exception):
    """Pickle cannot rebuild it: the constructor wants two arguments, `args` has one."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class LockedError(Exception):
    """One of its attributes does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.kept = [text]
        self.lock = threading.Lock()


class CallerKnowsNotError(ValueError):
    """Unpickles on the worker that raised it only."""

    def __reduce__(self) -> Any:
        return _only_there, (str(self),)


def _only_there(text: str) -> CallerKnowsNotError:
    if rpc.get_worker_info().name != "worker1":
        raise ImportError("no such class here")
    return CallerKnowsNotError(text)


def raise_value() -> None:
    raise ValueError(TEXT, 2)


def raise_os() -> None:
    os.stat("/nonexistent/ü")


def raise_two_parts() -> None:
    raise TwoPartError(7, TEXT)


def raise_locked() -> None:
    raise LockedError("held")


def raise_noted() -> None:
    error = KeyError("k")
    error.add_note("seen at the callee")
    raise error


class ExitsWhenReadError(Exception):
    """Wants to end the process that asks for its text."""

    def __str__(self) -> str:
        raise SystemExit(3)


def raise_unreadable() -> None:
    raise ExitsWhenReadError


def raise_caused() -> None:
    try:
        raise_value()
    except ValueError as cause:
        raise TwoPartError(1, "outer") from cause


def raise_local() -> None:
    class LocalError(Exception):
        pass

    raise LocalError(TEXT)


def raise_unknown() -> None:
    raise CallerKnowsNotError("only there")


def raise_typed() -> None:
    raise errors.FileTooShortError(
        "too short", path="/p", node="n", mount="m", hint="Grow it.", needed_bytes=9, actual_bytes=3
    )


def raise_exit() -> None:
    sys.exit("bye")


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def raise_cancelled() -> None:
    raise asyncio.CancelledError("stop")


def return_lock() -> Any:
    return threading.Lock()


def return_exception() -> Exception:
    return ValueError("a value")


@rpc.functions.async_execution
def complete_later(to: str, x: torch.Tensor, y: float) -> Any:
    return rpc.rpc_async(to, torch.add, (x, x)).then(lambda future: future.wait() + y)


@rpc.functions.async_execution
def fail_later() -> Any:
    future: Any = torch.futures.Future()
    threading.Timer(0.01, future.set_exception, [TwoPartError(3, TEXT)]).start()
    return future


@rpc.functions.async_execution
def fail_in_callback() -> Any:
    return rpc.rpc_async("worker0", len, ([],)).then(lambda _: raise_two_parts())


@rpc.functions.async_execution
def fail_at_once() -> Any:
    raise TwoPartError(4, "at once")


@rpc.functions.async_execution
def return_no_future() -> Any:
    return 3


def scripted(x: torch.Tensor, y: int) -> torch.Tensor:
    return x * y


def script(what: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch advises another compiler
        return torch.jit.script(what)


scripted = script(scripted)


class Doubler(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def apply(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def script_a_module() -> Any:
    return script(Doubler())


def keywords(a: int, *, b: dict[str, Any]) -> Any:
    return a, b


def add_row(x: torch.Tensor) -> torch.Tensor:
    x[0] += 1
    return x[1:]


def fail_in_wait_all() -> None:
    with torch.distributed.rpc.api._wait_all():
        rpc.rpc_async("worker1", len, ([],))
        rpc.rpc_async("worker1", raise_typed)


RAISERS = (
    *(raise_value, raise_os, raise_two_parts, raise_locked, raise_noted, raise_caused),
    *(raise_local, raise_unknown, raise_typed, raise_exit, raise_interrupt, raise_cancelled),
    *(return_lock, fail_later, fail_in_callback, fail_at_once, return_no_future),
)


def _error_of(future: Any) -> Any:
    try:
        return future.wait()
    except Exception as error:
        return error


def call_everything(rank: int, path: str) -> dict[str, Any]:
    if rank == 1:
        return {}
    found: dict[str, Any] = {}
    for fn in RAISERS:
        found[fn.__name__] = by_every_way(rpc, "worker1", fn)
    found["raise_unreadable"] = [
        type(rpc.rpc_async("worker1", raise_unreadable).then(_error_of).wait()),
        type(_error_of(rpc.rpc_async("worker1", raise_unreadable))),
    ]
    values = {
        "returned exception": (return_exception, ()),
        "builtin": (torch.sum, (torch.ones(3),)),
        "method": (torch.Tensor.add, (torch.ones(3), 1)),
        "script": (scripted, (torch.ones(2), 3)),
        "later": (complete_later, ("worker0", torch.ones(2), 1.5)),
        "module": (apply, (script_a_module(), torch.ones(2))),
        "sparse": (torch.Tensor.to_dense, (torch.eye(2).to_sparse(),)),
        "nested": (torch.Tensor.clone, (torch.nested.nested_tensor([torch.ones(2)]),)),
        "parameter": (type, (torch.nn.Parameter(torch.ones(2)),)),
    }
    for name, (fn, args) in values.items():
        found[name] = by_every_way(rpc, "worker1", fn, *args)
    found["script module result"] = rpc.rpc_sync("worker1", script_a_module)(torch.ones(2))
    found["keywords"] = rpc.rpc_sync("worker1", keywords, (1,), {"b": {"c": 2}})
    found["rank"] = rpc.rpc_sync(1, rpc.get_worker_info).name
    found["info"] = rpc.rpc_sync(rpc.get_worker_info("worker1"), rpc.get_worker_info).name
    with torch.distributed.rpc.api._wait_all():
        rpc.rpc_async("worker1", len, ([],))
    found["_wait_all"] = outcome(fail_in_wait_all)
    found["self"] = rpc.rpc_sync("worker0", len, ([1, 2],))
    found["unknown"] = outcome(lambda: rpc.rpc_sync("nobody", len, ([],)))
    found["unknown rank"] = outcome(lambda: rpc.remote(7, len, ([],)))
    found["no function"] = outcome(lambda: rpc.rpc_sync("worker1", 3))
    found["unpicklable argument"] = outcome(lambda: rpc.rpc_async("worker1", len, (lambda: 0,)))
    x = MemoryMappedTensor.from_tensor(torch.zeros(4, 2), filename=path)
    found["rest"] = rpc.rpc_sync("worker1", add_row, (x,))
    found["rest class"] = type(found["rest"]).__name__
    found["rest mapped"] = rpc.message_nbytes(add_row, (found["rest"],))
    found["view"] = rpc.rpc_sync("worker1", add_row, (x.t().t(),)).sum()
    found["scripted mapped"] = rpc.rpc_sync("worker1", scripted, (x, 2)).sum()
    found["leaf"] = rpc.rpc_sync(
        "worker1", torch.Tensor.requires_grad_, (x.view(-1).requires_grad_(),)
    ).requires_grad
    found["x"] = x.clone()
    del found["rest"]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one worker got from another by every kind of call."""
    return run(call_everything, 2, str(tmp_path_factory.mktemp("calls") / "x.bin"))[0]


WAYS = pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])


@WAYS
@pytest.mark.parametrize(
    ("fn", "cls", "text"),
    [
        (raise_value, ValueError, str(ValueError(TEXT, 2))),
        (raise_os, FileNotFoundError, "[Errno 2] No such file or directory: '/nonexistent/ü'"),
        (raise_two_parts, TwoPartError, f"7: {TEXT}"),
        (raise_locked, LockedError, "held"),
        (raise_noted, KeyError, "'k'"),
        (raise_caused, TwoPartError, "1: outer"),
        (fail_later, TwoPartError, f"3: {TEXT}"),
        (fail_in_callback, TwoPartError, f"7: {TEXT}"),
        (fail_at_once, TwoPartError, "4: at once"),
        (return_lock, TypeError, "cannot pickle '_thread.lock' object"),
    ],
)
def test_an_exception_arrives_as_itself(
    found: dict[str, Any], fn: Any, cls: type[Exception], text: str, way: str
) -> None:
    """Its class, its arguments and its text are those of the function's exception."""
    error = found[fn.__name__][way]
    assert error.cls is cls
    assert error.message == text


@WAYS
def test_attributes_of_an_exception_arrive(found: dict[str, Any], way: str) -> None:
    """Attributes and notes come along; an attribute that does not pickle stays behind."""
    assert (found["raise_two_parts"][way].code, found["raise_two_parts"][way].detail) == (7, TEXT)
    assert found["raise_locked"][way].kept == ["held"]
    assert not hasattr(found["raise_locked"][way], "lock")
    assert found["raise_noted"][way].__notes__ == ["seen at the callee"]
    assert found["raise_os"][way].filename == "/nonexistent/ü"
    typed = found["raise_typed"][way]
    assert (typed.path, typed.node, typed.mount, typed.hint) == ("/p", "n", "m", "Grow it.")
    assert (typed.needed_bytes, typed.actual_bytes) == (9, 3)


@WAYS
def test_the_remote_traceback_is_the_cause(found: dict[str, Any], way: str) -> None:
    """It names the line there, and what the exception there was caused by."""
    text = found["raise_caused"][way].cause
    assert "in raise_caused" in text
    assert "direct cause" in text
    assert "ValueError" in text


@WAYS
@pytest.mark.parametrize(
    ("fn", "type_name", "text"),
    [
        (raise_local, f"{__name__}.raise_local.<locals>.LocalError", TEXT),
        (raise_unknown, f"{__name__}.CallerKnowsNotError", "only there"),
        (raise_exit, "SystemExit", "bye"),
        (raise_interrupt, "KeyboardInterrupt", ""),
        (raise_cancelled, "asyncio.exceptions.CancelledError", "stop"),
    ],
)
def test_what_cannot_be_raised_here_is_a_remote_error(
    found: dict[str, Any], fn: Any, type_name: str, text: str, way: str
) -> None:
    """It tells the type, the text, the traceback and the call; the caller's process goes on."""
    error = found[fn.__name__][way]
    assert error.cls is errors.RemoteError
    assert (error.type_name, error.text) == (type_name, text)
    assert f"in {fn.__name__}" in error.traceback
    assert error.peer == "worker1"
    assert error.function == fn.__name__
    assert error.elapsed_s >= 0


@WAYS
def test_an_async_function_without_a_future_is_an_error(found: dict[str, Any], way: str) -> None:
    """The text says what it has to return."""
    error = found["return_no_future"][way]
    assert error.cls is TypeError
    assert "must return a torch.futures.Future, not int" in error.message


@WAYS
def test_values_arrive_by_every_way(found: dict[str, Any], way: str) -> None:
    """Builtins, methods, TorchScript, async functions, modules, sparse and nested tensors."""
    assert found["builtin"][way] == 3
    assert found["method"][way].tolist() == [2, 2, 2]
    assert found["script"][way].tolist() == [3, 3]
    assert found["later"][way].tolist() == [3.5, 3.5]
    assert found["module"][way].tolist() == [2, 2]
    assert found["sparse"][way].tolist() == [[1, 0], [0, 1]]
    assert found["nested"][way][0].tolist() == [1, 1]
    assert found["parameter"][way] is torch.nn.Parameter


def test_an_exception_that_cannot_be_read_leaves_nobody_waiting(found: dict[str, Any]) -> None:
    """It arrives, though its text ends whoever asks for it."""
    assert found["raise_unreadable"] == [ExitsWhenReadError] * 2


def test_an_exception_as_a_result_is_a_value(found: dict[str, Any]) -> None:
    """It is raised only if the function raised it."""
    error = found["returned exception"]["rpc_sync"]
    assert type(error) is ValueError
    assert error.__cause__ is None


def test_workers_are_named_in_every_way_of_torch(found: dict[str, Any]) -> None:
    """By name, rank and WorkerInfo, itself included; an unknown one is an error that names all."""
    assert found["rank"] == found["info"] == "worker1"
    assert found["self"] == 2
    for unknown, kind in (("unknown", "name"), ("unknown rank", "rank")):
        assert found[unknown].cls is errors.RpcError
        assert f"no worker of this group has that {kind}" in found[unknown].message
        assert "The group has worker0, worker1." in found[unknown].message


def test_torchs_wait_all_block_raises_failures(found: dict[str, Any]) -> None:
    """It collects the futures that are made in it."""
    assert found["_wait_all"].cls is errors.FileTooShortError


def test_what_cannot_be_sent_is_an_error_of_the_call(found: dict[str, Any]) -> None:
    """It is raised where the call is made, not in the future."""
    assert found["no function"].cls is TypeError
    assert "lambda" in found["unpicklable argument"].message


def test_keyword_arguments_and_script_modules_arrive(found: dict[str, Any]) -> None:
    """Both ways."""
    assert found["keywords"] == (1, {"c": 2})
    assert found["script module result"].tolist() == [2, 2]


def test_a_mapped_tensor_is_the_same_memory_on_both_sides(found: dict[str, Any]) -> None:
    """What the callee writes is seen here, and its result is mapped here as well."""
    assert found["rest class"] == "MemoryMappedTensor"
    assert found["x"][0].tolist() == [2, 2]
    assert found["view"] == 0


def test_a_script_function_reads_a_mapped_tensor_by_reference(found: dict[str, Any]) -> None:
    """torch's own way for TorchScript would copy it."""
    assert found["scripted mapped"] == 8


def test_a_mapped_leaf_still_requires_grad(found: dict[str, Any]) -> None:
    """As it does when torch sends a tensor."""
    assert found["leaf"] is True
