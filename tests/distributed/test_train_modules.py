"""Modules of every kind come to what torch alone comes to, and are whole after a restart."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mmrpc.train import ParameterServer, Trainer
from tests.distributed.test_train import SERVER, adam, momentum
from tests.distributed.workers import run
from tests.unit.train.test_attach import Odd

pytestmark = pytest.mark.timeout(180)
STEPS = 3


class Holder(Odd):
    """A module whose loss is the sum of squares of what it is trained for."""

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        trained = [p for p in self.parameters() if p.requires_grad]
        return sum(p.abs().square().sum().float() for p in trained)


def parameter(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype), **options)


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


def side_by_side() -> nn.Module:
    memory = torch.ones(4)
    return Holder(a=nn.Parameter(memory[:2]), b=nn.Parameter(memory[2:]))


def strange_names() -> nn.Module:
    names = ("ü\n\"'", "#sequence", "a", "a/b", "a#int", "x" * 10_000)
    return Holder(**{name: parameter(index + 1) for index, name in enumerate(names)})


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(2, 2),
    "tied": tied,
    "not contiguous": lambda: Holder(a=nn.Parameter(torch.arange(6.0).view(2, 3).t() + 1)),
    "side by side in one memory": side_by_side,
    "one frozen": lambda: Holder(a=parameter(2), b=parameter(3, requires_grad=False)),
    "scalar": lambda: Holder(a=parameter()),
    "empty": lambda: Holder(a=parameter(0, 3), b=parameter(2)),
    "half": lambda: Holder(a=parameter(3, dtype=torch.half)),
    "bfloat16": lambda: Holder(a=parameter(3, dtype=torch.bfloat16)),
    "complex": lambda: Holder(a=parameter(3, dtype=torch.complex64)),
    "mixed": lambda: Holder(
        a=parameter(3, dtype=torch.half), b=parameter(5, dtype=torch.float64), c=parameter(1)
    ),
    "float8, frozen": lambda: Holder(
        a=parameter(3),
        b=nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False),
    ),
    "whole numbers": lambda: Holder(a=parameter(3), b=torch.arange(3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    "strange names": strange_names,
    "recurrent": lambda: nn.RNNCell(2, 2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def backward(module: nn.Module) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    module(x).square().sum().backward()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def difference(one: nn.Module, other: nn.Module) -> str | None:
    """Name of the first tensor that differs."""
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        if (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(raw(a), raw(b)):
            return name
    return None


def train(make: Callable[[], nn.Module], optimizer: Any, directory: str, **options: Any) -> Any:
    """What differs from torch alone: in the server, in the trainer, and after a restart."""
    alone, served, trained = made(make), made(make), made(make)
    steps = optimizer(alone.parameters())
    with ParameterServer(served, optimizer, directory, **options), Trainer(trained, SERVER) as t:
        for _ in range(STEPS):
            steps.zero_grad()
            backward(alone)
            steps.step()
            backward(trained)
            t.step()
    with ParameterServer(made(make), optimizer, directory, **options) as again:
        ours, theirs = again.optimizer.state_dict()["state"], steps.state_dict()["state"]
        same = {k: sorted(map(str, v)) for k, v in ours.items()} == {
            k: sorted(map(str, v)) for k, v in theirs.items()
        }
        found = [difference(alone, m) for m in (served, trained, again.module)]
        return [*found, None if same else "optimizer", again.resumed_from]


def work(rank: int, directory: str) -> Any:
    torch.set_num_threads(1)
    found = {}
    for consistency in ("live", "published"):
        for optimizer in (adam, momentum):
            for name, make in MODULES.items():
                key = f"{consistency} {optimizer.__name__} {name}"
                path = os.path.join(directory, str(len(found)))
                options = {"consistency": consistency, "durable": False}
                found[key] = train(make, optimizer, path, **options)
    return found


def test_every_kind_of_module(tmp_path) -> None:
    """Bit for bit, with and without versions, for two optimizers."""
    found = run(work, 1, str(tmp_path))[0]
    assert len(found) == 4 * len(MODULES)
    wrong = {key: value for key, value in found.items() if value != [None] * 4 + [STEPS]}
    assert wrong == {}
