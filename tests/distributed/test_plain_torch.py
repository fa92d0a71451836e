"""References in calls through torch.distributed.rpc itself."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc

from mmrpc import MemoryMappedTensor, errors, rpc
from tests.distributed.workers import outcome, run

TEXT = "ü \\x41"
_mine: dict[str, Any] = {}


def prepare(directory: str) -> None:
    for name in ("whole", "gone"):
        path = f"{directory}/{name}-{os.getpid()}.bin"
        _mine[name] = MemoryMappedTensor.from_tensor(torch.arange(6.0), filename=path)
    os.unlink(_mine["gone"].filename)


def describe(x: Any) -> Any:
    return type(x).__name__, float(x.sum())


def describe_parameter(x: Any) -> Any:
    return type(x).__name__, x.requires_grad, float(x.detach().sum())


def hold(x: Any) -> str:
    """Does not use the tensor."""
    return repr(x)


def give(name: str, view: bool) -> Any:
    return {"x": _mine[name].view(2, 3) if view else _mine[name]}


def pass_on(x: Any) -> Any:
    return [x]


def by_torch(to: str, fn: Any, *args: Any) -> dict[str, Any]:
    return {
        "rpc_sync": outcome(lambda: torch_rpc.rpc_sync(to, fn, args)),
        "rpc_async": outcome(lambda: torch_rpc.rpc_async(to, fn, args).wait()),
        "remote": outcome(lambda: torch_rpc.remote(to, fn, args).to_here(timeout=20)),
    }


def first_use(reply: Any) -> Any:
    return describe(reply["x"]) if isinstance(reply, dict) else reply


@rpc.functions.async_execution
def fail_through_our_future(text: str) -> Any:
    return rpc.rpc_async("worker0", len, ([],)).then(lambda _: fail(text))


def fail(text: str) -> None:
    raise LookupError(text)


def drive(rank: int, directory: str) -> dict[str, Any]:
    if rank == 1:
        return {}
    prepare(directory)
    torch_rpc.rpc_sync("worker1", prepare, (directory,))
    whole, gone = _mine["whole"], _mine["gone"]
    found: dict[str, Any] = {
        "argument": by_torch("worker1", describe, whole),
        "view": by_torch("worker1", describe, whole.view(-1)),
        "parameter": by_torch(
            "worker1", describe_parameter, torch.nn.Parameter(whole.view(-1), requires_grad=True)
        ),
        "ordinary": by_torch("worker1", describe, torch.ones(3)),
        "sparse": by_torch("worker1", describe, torch.eye(3).to_sparse()),
        "result": {
            k: describe(v["x"]) for k, v in by_torch("worker1", give, "whole", False).items()
        },
        "view result": {
            k: describe(v["x"]) for k, v in by_torch("worker1", give, "whole", True).items()
        },
        "gone argument": by_torch("worker1", describe, gone),
        "gone, unused": by_torch("worker1", hold, gone),
        "gone view": by_torch("worker1", describe, gone.view(-1)),
        "gone parameter": by_torch(
            "worker1", describe, torch.nn.Parameter(gone.view(-1), requires_grad=False)
        ),
        "gone result": {
            k: outcome(lambda v=v: first_use(v))
            for k, v in by_torch("worker1", give, "gone", False).items()
        },
        "passed on": {
            k: outcome(lambda v=v: describe(v[0]))
            for k, v in by_torch("worker1", pass_on, gone).items()
        },
    }
    found["failed future"] = by_torch("worker1", fail_through_our_future, TEXT)
    found["after"] = torch_rpc.rpc_sync("worker1", describe, (whole,))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What plain torch calls gave; the group has shut down when this returns."""
    return run(drive, 2, str(tmp_path_factory.mktemp("plain")))[0]


WAYS = pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])


@WAYS
def test_tensors_arrive(found: dict[str, Any], way: str) -> None:
    """Mapped ones, views of them, Parameters and ordinary ones, as argument and as result."""
    assert found["argument"][way] == ("MemoryMappedTensor", 15.0)
    assert found["view"][way] == ("Tensor", 15.0)
    assert found["parameter"][way] == ("Parameter", True, 15.0)
    assert found["ordinary"][way] == ("Tensor", 3.0)
    assert found["sparse"][way] == ("Tensor", 3.0)
    assert found["result"][way] == ("MemoryMappedTensor", 15.0)
    assert found["view result"][way] == ("Tensor", 15.0)


@WAYS
@pytest.mark.parametrize("what", ["gone argument", "gone view", "gone parameter"])
def test_a_broken_argument_is_an_error_of_the_call(
    found: dict[str, Any], what: str, way: str
) -> None:
    """torch keeps no type, but the text says what is missing where, and nothing hangs."""
    error = found[what][way]
    assert "worker1 cannot find" in error.message
    assert "timeout" not in error.message


@WAYS
def test_a_broken_argument_that_is_not_used_is_no_error(found: dict[str, Any], way: str) -> None:
    """What stands in for it can be printed."""
    assert found["gone, unused"][way].startswith("<unopened tensor: PathNotFoundError: worker1")


@WAYS
@pytest.mark.parametrize("what", ["gone result", "passed on"])
def test_a_broken_result_is_a_typed_error_at_its_first_use(
    found: dict[str, Any], what: str, way: str
) -> None:
    """Also when a worker that could not open it passed it on."""
    assert found[what][way].cls is errors.PathNotFoundError
    assert found[what][way].node == "worker0"


@WAYS
def test_a_future_of_ours_that_failed_is_an_error_of_a_plain_call(
    found: dict[str, Any], way: str
) -> None:
    """torch would take the exception of its own for the result."""
    error = found["failed future"][way]
    assert issubclass(error.cls, (LookupError, RuntimeError))
    assert TEXT in error.message


def test_calls_after_broken_references_work(found: dict[str, Any]) -> None:
    """The workers go on, and their shutdown returned."""
    assert found["after"] == ("MemoryMappedTensor", 15.0)
