"""What a server does with pushes, called as trainers call it, but in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from mmrpc.core.system import host
from mmrpc.errors import LayoutError, MmrpcError
from mmrpc.train import attach
from mmrpc.train.arena import Arena
from mmrpc.train.coordinator import Coordinator
from mmrpc.train.messages import Join, Joined, Push, Pushed
from mmrpc.train.rounds import Policy
from mmrpc.train.slot import Slot
from mmrpc.train.state import TrainingState
from mmrpc.train.versions import Versions


def model() -> nn.Module:
    return nn.Linear(2, 1, bias=False)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


class World:
    """A server whose parameters begin at zero, and what trainers do with it."""

    def __init__(self, directory: Any, **policy: Any) -> None:
        self.versions = Versions(directory)
        module = model()
        nn.init.zeros_(module.weight)
        self.state = TrainingState(
            module, sgd, str(directory), self.versions, resume=True, trust_live=True
        )
        self.server = Coordinator(
            self.state,
            Policy(**policy),
            "live",
            self.versions,
            snapshot_every=100,
            max_grad_norm=None,
        )

    def join(self, name: str, *, by_value: bool = False) -> Joined:
        specs = attach.specs_of(model())
        return self.server.join(
            Join(name, host.host_id(), host.memory_host_id(), specs, by_value=by_value)
        )

    def push(self, name: str, joined: Joined, value: float, sequence: int = 1, **more: Any) -> Push:
        dense = {"weight": torch.full((1, 2), value)}
        if joined.slot is not None:
            slot = Slot(Arena(joined.slot))
            slot.begin(sequence)
            slot.gradients["weight"].fill_(value)
            slot.complete(sequence)
        version = more.pop("version", self.state.step_number)
        sent = dense if joined.slot is None else None
        return Push(name, joined.incarnation, sequence, version, dense=sent, **more)

    @property
    def weight(self) -> float:
        found: float = self.state.module.weight[0, 0].item()
        return found


@pytest.mark.parametrize("by_value", [False, True])
def test_two_trainers_make_a_step_of_their_mean(tmp_path, by_value: bool) -> None:
    """Who comes first is answered when the other has come; weights count."""
    world = World(tmp_path, trainers=2)
    a, b = (world.join(name, by_value=by_value) for name in "ab")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(world.server.push, world.push("a", a, 1.0))
        second = world.server.push(world.push("b", b, 5.0, weight=3.0))
        answers: list[Pushed] = [first.result(30), second]
    assert all(answer.is_used for answer in answers)
    assert world.weight == -4.0
    assert world.server.progress().trainers == 2


def test_a_push_is_used_once(tmp_path) -> None:
    """Repeated, it gets its answer again, and makes no step."""
    world = World(tmp_path)
    push = world.push("a", world.join("a"), 1.0)
    for _ in range(3):
        assert world.server.push(push).is_used
    assert world.state.step_number == 1
    assert world.weight == -1.0


def test_torn_memory_makes_no_step(tmp_path) -> None:
    """A slot that holds another push than the one that was announced is not used."""
    world = World(tmp_path)
    joined = world.join("a")
    push = world.push("a", joined, 1.0)
    Slot(Arena(joined.slot)).begin(2)
    assert not world.server.push(push).is_used
    assert world.weight == 0.0
    assert world.server.progress().dropped == 1


def test_torn_memory_does_not_lose_what_was_used_before(tmp_path) -> None:
    """What has been accumulated of other pushes stays in the next step."""
    world = World(tmp_path, update="async", accumulate=2)
    a, b = world.join("a"), world.join("b")
    assert world.server.push(world.push("a", a, 1.0)).is_used
    torn = world.push("b", b, 100.0)
    Slot(Arena(b.slot)).begin(2)
    assert not world.server.push(torn).is_used
    assert world.state.step_number == 0
    assert world.server.push(world.push("b", b, 3.0, sequence=2)).is_used
    assert world.weight == -2.0


def test_stale_gradients_are_dropped(tmp_path) -> None:
    """What is for parameters of too long ago is answered at once, and not used."""
    world = World(tmp_path, update="async", max_staleness=0)
    joined = world.join("a")
    world.server.push(world.push("a", joined, 1.0))
    answer = world.server.push(world.push("a", joined, 1.0, sequence=2, version=0))
    assert not answer.is_used
    assert answer.staleness == 1
    assert world.weight == -1.0


def test_losses_that_are_not_finite_show_and_pass(tmp_path) -> None:
    """A NaN is told while it lasts, and does not spoil the mean of later ones."""
    world = World(tmp_path)
    joined = world.join("a")
    seen = []
    for sequence, loss in enumerate([1.0, float("nan"), 2.0, 2.0], start=1):
        world.server.push(world.push("a", joined, 0.0, sequence, loss=loss))
        seen.append(world.server.progress().loss)
    assert [repr(loss) for loss in seen] == ["1.0", "nan", "2.0", "2.0"]


def test_who_is_not_in_is_told(tmp_path) -> None:
    """Another module, a joining that was replaced, one that never was, and a closed server."""
    world = World(tmp_path)
    with pytest.raises(LayoutError, match="the module of a has 'weight' as"):
        world.server.join(Join("a", "h", "m", attach.specs_of(nn.Linear(3, 1, bias=False))))
    first = world.join("a")
    world.join("a")
    with pytest.raises(MmrpcError, match="was replaced by another of its name"):
        world.server.push(world.push("a", first, 1.0))
    with pytest.raises(MmrpcError, match="'b' is not joined"):
        world.server.pull("b", 1)
    world.server.leave("a", first.incarnation)
    assert world.server.progress().trainers == 1
    with world.server.changed:
        world.server.close()
    with pytest.raises(MmrpcError, match="the parameter server was closed"):
        world.join("c")


def test_an_optimizer_that_fails_ends_the_training(tmp_path) -> None:
    """Half a step may have been made: nobody gets parameters of it, and the version stays."""
    world = World(tmp_path)
    joined = world.join("a")

    def fail() -> None:
        world.state.module.weight.data.fill_(99)
        raise FloatingPointError("it diverged")

    world.state.optimizer.step = fail
    for call in (
        lambda: world.server.push(world.push("a", joined, 1.0)),
        lambda: world.server.pull("a", joined.incarnation),
        lambda: world.join("b"),
    ):
        with pytest.raises(FloatingPointError, match="diverged"):
            call()
    newest = world.versions.newest()
    assert newest.number == 0
    assert not newest.tensors["weight"].any()
