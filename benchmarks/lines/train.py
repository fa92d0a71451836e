"""A parameter server with two trainers that compute nothing: what it costs to exchange."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from torch import nn

from benchmarks.harness import Alternative, Line
from benchmarks.lines import raw
from benchmarks.lines.peers import installed, peer
from benchmarks.lines.places import Places
from mmrpc.train import ParameterServer, Trainer

LEARNING_RATE = 0.01
_state: dict[str, Any] = {}


def lines(places: Places) -> Iterator[Line]:
    """The line of a step, in a world of a server and two trainers, which it asks to step."""
    width, memory = 1_000 if places.quick else 5_060, places.memory
    with ParameterServer(
        model(width), sgd, os.path.join(memory, "ps"), trainers=2, durable=False
    ) as server:
        _state["limit"] = Limit(width, memory)
        _state["plain"] = Plain(torch.zeros(width * width + width))
        _state["tensordict"] = Mapped(width, memory) if installed("tensordict") else None
        everyone(join, width, memory)
        yield _step(width)
        everyone(leave)
        assert server.step_number


def _step(width: int) -> Line:
    millions = (width * width + width) / 1e6
    return Line(
        f"parameter server, {millions:.1f} M parameters, 2 trainers, one step",
        {
            "mmrpc": Alternative(
                lambda: everyone(step_ours), before=lambda: everyone(backward_ours)
            ),
            "limit": lambda: everyone(step_limit),
            "plain torch RPC": lambda: everyone(step_plain),
            **peer("tensordict", lambda m: {"tensordict": lambda: everyone(step_tensordict)}),
        },
        1.1,
        how_limit="parameters and gradients in mapped files, a notice by torch's RPC",
        note=f"{1e6 * millions * 4 / 2**20:.0f} MiB of parameters",
        summary="parameter server, a step of two trainers",
    )


def everyone(function: Any, *args: Any) -> None:
    calls = [torch_rpc.rpc_async(f"worker{i}", function, (i - 1, *args)) for i in (1, 2)]
    for call in calls:
        call.wait()


def model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(width, width)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def join(number: int, width: int, memory: str) -> None:
    """Runs on a trainer: joins the server, and maps the files of the limit."""
    trainer = Trainer(model(width), "worker0")
    _state.update(trainer=trainer, width=width)
    count = width * width + width
    if installed("tensordict"):
        from tensordict import MemoryMappedTensor

        _state["gradient"] = MemoryMappedTensor.from_tensor(
            torch.zeros(count), filename=f"{memory}/tensordict-gradient{number}"
        )
    _state["maps"] = [
        raw.map_tensor(f"{memory}/limit-{name}", (count,), torch.float32)
        for name in ("parameters", f"gradient{number}")
    ]


def leave(number: int) -> None:
    """Runs on a trainer: leaves the server."""
    _state["trainer"].close()


def backward_ours(number: int) -> None:
    """Runs on a trainer: a gradient of ones, by torch's backward; without one nothing is done."""
    parameters = list(_state["trainer"].module.parameters())
    torch.autograd.backward(parameters, [torch.ones_like(p) for p in parameters])


def step_ours(number: int) -> None:
    """Runs on a trainer: its gradients are where they are; the server makes the step."""
    _state["trainer"].step()


def step_limit(number: int) -> None:
    """Runs on a trainer: tells that the gradient is there, waits for the step, and clears it."""
    torch_rpc.rpc_sync("worker0", limit_push, (number,))
    _state["maps"][1].zero_()  # a backward adds to it


def step_plain(number: int) -> None:
    """Runs on a trainer: sends gradients, gets parameters."""
    width = _state["width"]
    gradient = torch.zeros(width * width + width)
    torch_rpc.rpc_sync("worker0", plain_push, (gradient,))


def step_tensordict(number: int) -> None:
    """Runs on a trainer: sends its gradient as tensordict's reference, gets parameters."""
    torch_rpc.rpc_sync("worker0", tensordict_push, (_state["gradient"],))


class Barrier:
    """Runs a function once when two have come, on the thread of the second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[torch.futures.Future[Any]] = []

    def come(self, then: Any) -> torch.futures.Future[Any]:
        mine: torch.futures.Future[Any] = torch.futures.Future()
        with self._lock:
            self._waiting.append(mine)
            if len(self._waiting) < 2:
                return mine
            ready, self._waiting = self._waiting, []
        value = then()
        for future in ready:
            future.set_result(value)
        return mine


class Limit:
    """The least: mapped parameters and gradients, and torch's optimizer."""

    def __init__(self, width: int, memory: str) -> None:
        count = width * width + width
        self.parameters = nn.Parameter(
            raw.write_tensor(f"{memory}/limit-parameters", torch.zeros(count), reserve=False)
        )
        self.gradients = [
            raw.write_tensor(f"{memory}/limit-gradient{i}", torch.zeros(count), reserve=False)
            for i in (0, 1)
        ]
        self.optimizer = sgd([self.parameters])
        self.parameters.grad = torch.zeros(count)
        self.barrier = Barrier()

    def step(self) -> None:
        assert self.parameters.grad is not None
        torch.lerp(*self.gradients, 0.5, out=self.parameters.grad)
        self.optimizer.step()


class Plain:
    """The same by torch's RPC: gradients in, parameters out."""

    def __init__(self, parameters: torch.Tensor) -> None:
        self.parameters = nn.Parameter(parameters)
        self.optimizer = sgd([self.parameters])
        self.gradients: list[torch.Tensor] = []
        self.barrier = Barrier()

    def step(self) -> torch.Tensor:
        first, second = self.gradients[-2:]
        self.parameters.grad = (first + second).mul_(0.5)
        self.gradients.clear()
        self.optimizer.step()
        return self.parameters.detach()


class Mapped(Plain):
    """The same with tensordict's references in both directions."""

    def __init__(self, width: int, memory: str) -> None:
        from tensordict import MemoryMappedTensor

        self.reference = MemoryMappedTensor.from_tensor(
            torch.zeros(width * width + width), filename=f"{memory}/tensordict-parameters"
        )
        super().__init__(self.reference.as_subclass(torch.Tensor))

    def step(self) -> torch.Tensor:
        super().step()
        return self.reference


@torch_rpc.functions.async_execution
def limit_push(number: int) -> torch.futures.Future[Any]:
    """Runs on the server."""
    limit: Limit = _state["limit"]
    return limit.barrier.come(limit.step)


@torch_rpc.functions.async_execution
def plain_push(gradient: torch.Tensor) -> torch.futures.Future[Any]:
    """Runs on the server."""
    plain: Plain = _state["plain"]
    plain.gradients.append(gradient)
    return plain.barrier.come(plain.step)


@torch_rpc.functions.async_execution
def tensordict_push(gradient: torch.Tensor) -> torch.futures.Future[Any]:
    """Runs on the server."""
    server: Plain = _state["tensordict"]
    server.gradients.append(gradient)
    return server.barrier.come(server.step)
