"""RRefs: values that stay on their owner, and travel between three workers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors, rpc
from tests.distributed.workers import outcome, run


class Counter:
    """An object on another worker, with a mapped tensor in it."""

    def __init__(self, path: str) -> None:
        self.total = 0
        self.x = MemoryMappedTensor.from_tensor(torch.arange(6.0), filename=path)

    def add(self, value: int, *, times: int = 1) -> int:
        self.total += value * times
        return self.total

    def row(self) -> torch.Tensor:
        return self.x[2:4]

    def fail(self) -> None:
        raise errors.ConfigError("bad", key="k")

    @rpc.functions.async_execution
    def add_later(self, to: str, value: int) -> Any:
        return rpc.rpc_async(to, abs, (value,)).then(lambda future: self.add(future.wait()))

    @staticmethod
    @rpc.functions.async_execution
    def static_later(to: str) -> Any:
        return rpc.rpc_async(to, len, ([1],))


def use(rref: rpc.RRef[Counter]) -> Any:
    """What a third worker sees of an RRef that it was passed."""
    here = rref.rpc_sync().row()
    return (
        type(rref).__name__,
        rref.owner_name(),
        rref.is_owner(),
        rref.rpc_sync().add(5),
        type(here).__name__,
        here.sum(),
    )


def make_local() -> rpc.RRef[dict[str, int]]:
    return rpc.RRef({"made": 1})


def local_total(rref: rpc.RRef[Counter]) -> int:
    return rref.local_value().total


def pass_on(rref: rpc.RRef[Counter]) -> rpc.RRef[Counter]:
    return rref


def torch_to_here(rref: Any) -> Any:
    return rref.to_here()


def drive(rank: int, directory: str) -> dict[str, Any]:
    if rank != 0:
        return {}
    found: dict[str, Any] = {}
    rref = rpc.remote("worker1", Counter, (f"{directory}/x.bin",))
    found["is RRef"] = isinstance(rref, rpc.RRef)
    found["owner"] = (rref.owner().name, rref.owner().id, rref.owner_name(), rref.is_owner())
    found["sync"] = rref.rpc_sync().add(1, times=2)
    found["async"] = rref.rpc_async(timeout=30).add(1).wait()
    found["remote"] = rref.remote().add(1).to_here()
    found["later"] = rref.rpc_sync().add_later("worker2", -6)
    found["later remote"] = rref.remote().add_later("worker2", 10).to_here()
    found["static later"] = rref.rpc_async().static_later("worker2").wait()
    found["fail"] = outcome(rref.rpc_sync().fail)
    found["fail async"] = outcome(lambda: rref.rpc_async().fail().wait())
    found["no method"] = outcome(rref.rpc_sync().nothing)
    found["third"] = rpc.rpc_sync("worker2", use, (rref,))
    found["on owner"] = rpc.rpc_sync("worker1", local_total, (rref,))
    found["back"] = rpc.rpc_sync("worker2", pass_on, ([rref],))[0].rpc_sync().add(0)
    found["made there"] = rpc.rpc_sync("worker2", make_local).to_here()
    found["type"] = rref._get_type()
    found["type later"] = rref._get_type(blocking=False).wait()
    found["confirmed"] = rref.confirmed_by_owner()
    local = rpc.RRef([1, 2])
    found["local"] = (local.is_owner(), local.local_value(), local.to_here())
    found["local passed"] = rpc.rpc_sync("worker2", torch_to_here, (local,))
    found["by plain torch"] = torch.distributed.rpc.rpc_sync("worker2", torch_to_here, (local,))
    found["not owner"] = outcome(rref.local_value)
    path = f"{directory}/gone.bin"
    gone = rpc.RRef(MemoryMappedTensor.from_tensor(torch.ones(3), filename=path))
    os.unlink(path)
    found["gone"] = outcome(lambda: rpc.rpc_sync("worker2", torch_to_here, (gone,)))
    found["unpicklable"] = outcome(
        lambda: rpc.rpc_sync("worker2", torch_to_here, (rpc.RRef(lambda: 0),))
    )
    found["repr"] = repr(rref)
    found["two copies"] = rpc.remote("worker1", list, ((1, 2),)).to_here()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What three workers did with RRefs."""
    return run(drive, 3, str(tmp_path_factory.mktemp("rrefs")))[0]


def test_an_rref_knows_its_owner(found: dict[str, Any]) -> None:
    """By name and rank, and whether the owner knows of it."""
    assert found["is RRef"]
    assert found["owner"] == ("worker1", 1, "worker1", False)
    assert found["confirmed"] is True
    assert "worker" in found["repr"] or "RRef" in found["repr"]


def test_methods_run_on_the_owner(found: dict[str, Any]) -> None:
    """Through all three proxies, with keyword arguments, and with async methods."""
    assert [found[key] for key in ("sync", "async", "remote")] == [2, 3, 4]
    assert [found[key] for key in ("later", "later remote")] == [10, 20]
    assert found["static later"] == 1


def test_errors_of_methods_are_typed(found: dict[str, Any]) -> None:
    """With their attributes; a method that is not there is an AttributeError."""
    for key in ("fail", "fail async"):
        assert found[key].cls is errors.ConfigError
        assert found[key].key == "k"
    assert found["no method"].cls is AttributeError


def test_an_rref_travels_between_workers(found: dict[str, Any]) -> None:
    """A third worker uses it, the owner has the value itself, and it comes back."""
    assert found["third"] == ("RRef", "worker1", False, 25, "MemoryMappedTensor", 5.0)
    assert found["on owner"] == found["back"] == 25
    assert found["made there"] == {"made": 1}


def test_the_type_of_a_value_is_known_without_it(found: dict[str, Any]) -> None:
    """As torch's proxies ask for it."""
    assert found["type"] is found["type later"] is Counter


def test_a_local_value_is_given_as_it_is_and_sent_to_others(found: dict[str, Any]) -> None:
    """The constructor makes this worker the owner; plain torch calls can carry it too."""
    assert found["local"] == (True, [1, 2], [1, 2])
    assert found["local passed"] == found["by plain torch"] == [1, 2]
    assert found["not owner"].cls is RuntimeError


def test_a_value_that_cannot_be_fetched_is_a_typed_error(found: dict[str, Any]) -> None:
    """Because its file is gone, or because it does not pickle."""
    assert found["gone"].cls is errors.PathNotFoundError
    assert found["gone"].node == "worker2"
    assert "pickle" in found["unpicklable"].message
