"""Distributed autograd and DistributedOptimizer through mmrpc.rpc."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd

from mmrpc import MemoryMappedTensor, rpc
from tests.distributed.workers import run

STEPS = 3
RATE = 0.1


def weight() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) / 10


def inputs() -> torch.Tensor:
    return torch.arange(12.0).reshape(4, 3) / 7


class Layer:
    """A layer on another worker, whose input is a mapped tensor."""

    def __init__(self) -> None:
        self.weight = weight().requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()

    def weight_rref(self) -> rpc.RRef[torch.Tensor]:
        return rpc.RRef(self.weight)

    def value(self) -> torch.Tensor:
        return self.weight.detach()


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum()


def nested(to: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, multiply, (a, b)) * 2


def call(way: str, to: str, fn: Any, args: tuple[Any, ...]) -> Any:
    if way == "rpc_sync":
        return rpc.rpc_sync(to, fn, args)
    if way == "rpc_async":
        return rpc.rpc_async(to, fn, args).wait()
    return rpc.remote(to, fn, args).to_here()


def gradients(way: str) -> list[Any]:
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    b = torch.tensor([3.0, 5.0], requires_grad=True)
    with dist_autograd.context() as context:
        loss = call(way, "worker1", multiply, (a, b)) + call(
            way, "worker1", nested, ("worker0", a, b)
        )
        dist_autograd.backward(context, [loss])
        found = dist_autograd.get_gradients(context)
        return [found[a].tolist(), found[b].tolist()]


def train(optimizer_class: Any, x: torch.Tensor) -> torch.Tensor:
    layer = rpc.remote("worker1", Layer)
    rrefs = [layer.rpc_sync().weight_rref()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it scripts its optimizers
        from torch.distributed.optim import DistributedOptimizer

        optimizer = DistributedOptimizer(optimizer_class, rrefs, lr=RATE)
    for _ in range(STEPS):
        with dist_autograd.context() as context:
            loss = layer.rpc_sync().forward(x).pow(2).mean()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
    return layer.rpc_sync().value()


class PlainSGD(torch.optim.SGD):
    """Has no functional twin, so that torch runs it without TorchScript."""


def drive(rank: int, path: str) -> dict[str, Any]:
    if rank == 1:
        return {}
    found: dict[str, Any] = {way: gradients(way) for way in ("rpc_sync", "rpc_async", "remote")}
    x = MemoryMappedTensor.from_tensor(inputs(), filename=path)
    found["functional"] = train(torch.optim.SGD, x)
    found["plain"] = train(PlainSGD, x)
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    with dist_autograd.context() as context:
        rref = rpc.remote("worker1", multiply, (a, a))
        rref.backward(context)
        found["rref"] = dist_autograd.get_gradients(context)[a].tolist()
    leaf = torch.tensor(2.0, requires_grad=True)
    rpc.RRef(leaf * 3).backward()
    found["local rref"] = leaf.grad.item()  # type: ignore[union-attr]
    with dist_autograd.context() as context:
        mapped = x.view(-1).requires_grad_()
        loss = rpc.rpc_sync("worker1", multiply, (mapped, mapped))
        dist_autograd.backward(context, [loss])
        found["mapped leaf"] = dist_autograd.get_gradients(context)[mapped].tolist()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Gradients and trained weights."""
    return run(drive, 2, str(tmp_path_factory.mktemp("autograd") / "x.bin"))[0]


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
def test_gradients_flow_through_calls(found: dict[str, Any], way: str) -> None:
    """Through a call, and through a call nested in it."""
    assert found[way] == [[9, 15], [3, 6]]


def test_gradients_flow_from_an_rref(found: dict[str, Any]) -> None:
    """On its owner, with a context and without."""
    assert found["rref"] == [2, 4]
    assert found["local rref"] == 3


def test_a_mapped_tensor_that_requires_grad_is_part_of_the_graph(found: dict[str, Any]) -> None:
    """In a context it is sent as torch does, which hooks the graph in there."""
    assert found["mapped leaf"] == pytest.approx((2 * inputs()).flatten().tolist())


@pytest.mark.parametrize("kind", ["functional", "plain"])
def test_distributed_optimizer_trains_through_rrefs(found: dict[str, Any], kind: str) -> None:
    """To the same weights as the same steps in one process."""
    expected = weight().requires_grad_()
    optimizer = torch.optim.SGD([expected], lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (inputs() @ expected.t()).pow(2).mean().backward()
        optimizer.step()
    assert torch.allclose(found[kind], expected.detach())
