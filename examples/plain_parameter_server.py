"""The same training through torch's own RPC: gradients are sent, and parameters come back.

It follows the usual pattern for that: the server collects a gradient of every trainer and
answers all of them with the new parameters when it has made a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
import torch.distributed.rpc as torch_rpc
from torch import nn
from torch.distributed.rpc import internal as torch_internal

Gradients = list[torch.Tensor]

_server: PlainServer
_has_server = threading.Event()


class PlainServer:
    """Holds the parameters; a trainer calls `push` on it by RPC."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        trainers: int,
    ) -> None:
        global _server
        self.module = module
        self._optimizer = optimizer(module.parameters())
        self._trainers = trainers
        self._lock = threading.Lock()
        self._waiting: list[Gradients] = []
        self._answer: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        _server = self
        _has_server.set()

    def take(self, gradients: Gradients) -> torch.futures.Future[list[torch.Tensor]]:
        with self._lock:
            self._waiting.append(gradients)
            answer = self._answer
            if len(self._waiting) == self._trainers:
                for p, *parts in zip(self.module.parameters(), *self._waiting, strict=True):
                    p.grad = torch.stack(parts).mean(0)
                self._optimizer.step()
                self._waiting, self._answer = [], torch.futures.Future()
                answer.set_result(values(self.module))
        return answer


def values(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@torch_rpc.functions.async_execution
def push(gradients: Gradients) -> torch.futures.Future[list[torch.Tensor]]:
    if not _has_server.wait(60):
        raise RuntimeError("there is no server here")
    return _server.take(gradients)


class PlainTrainer:
    """The trainer's side."""

    def __init__(self, module: nn.Module, server: str) -> None:
        self.module, self._server = module, server
        self.nbytes = 0

    def step(self) -> None:
        gradients = [p.grad for p in self.module.parameters()]
        parameters = torch_rpc.rpc_sync(self._server, push, (gradients,))
        with torch.no_grad():
            for p, value in zip(self.module.parameters(), parameters, strict=True):
                p.copy_(value)
                p.grad = None

    def message_nbytes(self) -> int:
        """Bytes of one step's request and answer."""
        call = torch_internal.PythonUDF(push, (values(self.module),), {})
        data, tensors = torch_internal.serialize(call)
        return 2 * (len(data) + sum(tensor.nbytes for tensor in tensors))
