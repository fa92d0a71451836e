"""A parameter server and its trainers, as processes: the same numbers as in one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from mmrpc import rpc
from mmrpc.core.system import host
from mmrpc.errors import LayoutError, MmrpcError
from mmrpc.train import ParameterServer, Trainer, latest
from tests.distributed.workers import outcome, run

pytestmark = pytest.mark.timeout(180)
SERVER = "worker0"
BATCH = 16
STEPS = 12


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(BATCH, 8, generator=generator),
        torch.randn(BATCH, 1, generator=generator),
    )


def loss_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(module(x), y)


def alone(optimizer: Any, steps: int = STEPS, max_norm: float | None = None) -> list[torch.Tensor]:
    """What one process comes to with whole batches."""
    module = model()
    made = optimizer(module.parameters())
    for step in range(steps):
        made.zero_grad()
        loss_of(module, *samples(step)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        made.step()
    return [p.detach() for p in module.parameters()]


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def serve(directory: str, optimizer: Any, **options: Any) -> ParameterServer:
    """Serves until all have left."""
    with ParameterServer(model(), optimizer, directory, **options) as server:
        assert server.wait(90)
    return server


def values(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


# All together.


def work_sync(rank: int, directory: str, optimizer: Any, options: Any, parts: Any) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        server = serve(directory, optimizer, trainers=2, **options)
        return values(server.module), server.progress()
    with Trainer(model(), SERVER) as trainer:
        for step in range(STEPS):
            part = slice(*parts[rank - 1])
            x, y = (tensor[part] for tensor in samples(step))
            loss = loss_of(trainer.module, x, y)
            loss.backward()
            answer = trainer.step(loss=loss.item(), weight=len(x))
            assert answer.is_used
            assert answer.staleness == 0
            assert trainer.version == step + 1
        return values(trainer.module), str(trainer.link), trainer.push_nbytes()


@pytest.mark.parametrize(
    ("optimizer", "options", "parts"),
    [
        (momentum, {}, [(0, 8), (8, 16)]),
        (adam, {"consistency": "published"}, [(0, 8), (8, 16)]),
        (adam, {"max_grad_norm": 0.1}, [(0, 4), (4, 16)]),
    ],
    ids=["live", "published", "clipped, of different sizes"],
)
def test_sync_is_one_process(tmp_path, optimizer, options, parts) -> None:
    """Two trainers with parts of each batch come to what one process does with the whole."""
    (ours, progress), *trainers = run(work_sync, 3, str(tmp_path), optimizer, options, parts)
    expected = alone(optimizer, max_norm=options.get("max_grad_norm"))
    assert_close(ours, expected)
    assert progress.step == STEPS
    assert progress.loss is not None
    assert progress.dropped == 0
    consistency = options.get("consistency", "live")
    for theirs, link, nbytes in trainers:
        assert_close(theirs, expected)
        assert link == f"parameters {consistency}, gradients mapped: it is on the same host"
        assert nbytes < 600
    assert latest(tmp_path).number == STEPS
    assert_close([latest(tmp_path).tensors[name] for name, _ in model().named_parameters()], ours)


# Without a common memory.


def work_by_value(rank: int, directory: str) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        return values(serve(directory, adam).module)
    with Trainer(model(), SERVER, by_value=True) as trainer:
        for step in range(STEPS):
            loss_of(trainer.module, *samples(step)).backward()
            trainer.step()
        return values(trainer.module), str(trainer.link)


def test_by_value_is_the_same(tmp_path) -> None:
    """Where nothing can be mapped, tensors are sent, and the numbers are the same."""
    ours, (theirs, link) = run(work_by_value, 2, str(tmp_path))
    assert_close(ours, alone(adam))
    assert_close(theirs, ours)
    assert link == "parameters values, gradients values: it cannot map the server's files"


def work_elsewhere(rank: int, directory: str) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        return values(serve(directory, adam).module)
    # As a process of another host says: what the server then sends, it cannot open.
    for name in ("host_id", "memory_host_id"):
        setattr(host, name, lambda: "elsewhere")
    with Trainer(model(), SERVER) as trainer:
        loss_of(trainer.module, *samples(0)).backward()
        trainer.step()
        return values(trainer.module), trainer.link.gradients


def test_another_host_without_a_mount_gets_values(tmp_path) -> None:
    """What cannot be opened there is sent instead, and the link says so."""
    ours, (theirs, gradients) = run(work_elsewhere, 2, str(tmp_path))
    assert_close(ours, alone(adam, 1))
    assert_close(theirs, ours)
    assert gradients == "values"


# One after another.


def work_async(rank: int, directory: str, options: Any) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        server = serve(directory, adam, trainers=2, update="async", **options)
        return server.progress(), values(server.module)
    stalenesses = []
    with Trainer(model(), SERVER) as trainer:
        for step in range(40):
            loss = loss_of(trainer.module, *samples(step % 3))
            loss.backward()
            stalenesses.append(trainer.step(loss=loss.item()).staleness)
    return stalenesses


@pytest.mark.parametrize("consistency", ["live", "published"])
def test_async_learns(tmp_path, consistency: str) -> None:
    """Each push makes a step, nobody waits for anybody, and the loss falls."""
    (progress, found), *stalenesses = run(
        work_async, 3, str(tmp_path), {"consistency": consistency}
    )
    assert progress.step == 80
    assert all(s >= 0 for trainer in stalenesses for s in trainer)
    before = after = 0.0
    module = model()
    for step in range(3):
        before += loss_of(module, *samples(step)).item()
    for p, value in zip(module.parameters(), found, strict=True):
        p.data = value
    for step in range(3):
        after += loss_of(module, *samples(step)).item()
    assert after < 0.9 * before


def work_accumulate(rank: int, directory: str) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        server = serve(directory, adam, update="async", accumulate=2)
        return server.step_number, values(server.module)
    with Trainer(model(), SERVER) as trainer:
        for step in range(STEPS):
            x, y = samples(step)
            for half in (slice(0, 8), slice(8, 16)):
                loss_of(trainer.module, x[half], y[half]).backward()
                trainer.step()
    return None


def test_async_accumulates_on_the_server(tmp_path) -> None:
    """Two pushes of halves make the step of the whole batch."""
    (steps, ours), _ = run(work_accumulate, 2, str(tmp_path))
    assert steps == STEPS
    assert_close(ours, alone(adam))


# What a training loop may do.


def work_loops(rank: int, directory: str) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        return values(serve(directory, adam).module)
    with Trainer(model(), SERVER) as trainer:
        for step in range(STEPS):
            x, y = samples(step)
            # Gradients of no account are forgotten, by the trainer's way or torch's.
            loss_of(trainer.module, x + 1, y).backward()
            trainer.zero_grad() if step % 2 else trainer.module.zero_grad(set_to_none=True)
            # Two calls of backward add up.
            for half in (slice(0, 8), slice(8, 16)):
                (loss_of(trainer.module, x[half], y[half]) / 2).backward()
            trainer.step()
            assert trainer.pull() == step + 1
        inside = trainer.module[0].weight.untyped_storage().filename
    return (
        inside,
        trainer.module[0].weight.untyped_storage().filename,
        trainer.module[0].weight.grad,
    )


def test_ordinary_loops_work(tmp_path) -> None:
    """zero_grad, accumulation and pull do what they do with an optimizer of one's own."""
    ours, (inside, after, gradient) = run(work_loops, 2, str(tmp_path))
    assert_close(ours, alone(adam))
    assert inside == str(tmp_path / "live.safetensors")
    assert after is None
    assert gradient is None


class Branches(nn.Module):
    """Uses one branch at a time, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(8)
        self.a, self.b = nn.Linear(8, 1), nn.Linear(8, 1)
        self.tied = self.a
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor, use_b: bool) -> torch.Tensor:
        return (self.b if use_b else self.a)(self.norm(x)) * self.frozen


def work_branches(rank: int, directory: str) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        with ParameterServer(Branches(), momentum, directory) as server:
            assert server.wait(90)
            return {k: v.clone() for k, v in server.module.state_dict().items()}
    with Trainer(Branches(), SERVER) as trainer:
        for step in range(STEPS):
            x, y = samples(step)
            nn.functional.mse_loss(trainer.module(x, step > 5), y).backward()
            trainer.step()
    return None


def test_unused_parameters_buffers_and_tied_weights(tmp_path) -> None:
    """A branch that is not used is not decayed, and running statistics reach the server."""
    ours, _ = run(work_branches, 2, str(tmp_path))
    module = Branches()
    optimizer = momentum([p for p in module.parameters() if p.requires_grad])
    for step in range(STEPS):
        x, y = samples(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x, step > 5), y).backward()
        optimizer.step()
    assert ours.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


# Sparse gradients.


class Bag(nn.Module):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(1000, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(rows).mean(1))


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def rows_of(step: int) -> torch.Tensor:
    return torch.randint(1000, (6, 5), generator=torch.Generator().manual_seed(step))


def work_sparse(rank: int, directory: str, by_value: bool) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        with ParameterServer(Bag(), plain_sgd, directory, trainers=2) as server:
            assert server.wait(90)
            return values(server.module)
    with Trainer(Bag(), SERVER, by_value=by_value) as trainer:
        for step in range(STEPS):
            half = rows_of(step)[3 * (rank - 1) : 3 * rank]
            trainer.module(half).square().mean().backward()
            assert trainer.module.table.weight.grad.is_sparse
            nbytes = trainer.push_nbytes()
            trainer.step()
        return nbytes


@pytest.mark.parametrize("by_value", [False, True])
def test_sparse_rows(tmp_path, by_value: bool) -> None:
    """Only the rows that a batch used are given and changed, with the numbers of one process."""
    ours, *nbytes = run(work_sparse, 3, str(tmp_path), by_value)
    module = Bag()
    optimizer = plain_sgd(module.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        module(rows_of(step)).square().mean().backward()
        optimizer.step()
    assert_close(ours, values(module))
    assert by_value or all(n < 1200 for n in nbytes)


# Who comes too late.


def work_quorum(rank: int, directory: str) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        server = serve(directory, momentum, trainers=3, quorum=2)
        return server.progress()
    answers = []
    with Trainer(model(), SERVER) as trainer:
        loss_of(trainer.module, *samples(rank)).backward()
        if rank == 3:  # its gradient is for step 0; it pushes when that is made
            while rpc.rpc_sync(SERVER, step_of_server) == 0:
                pass
        answers.append(trainer.step())
    return answers


def step_of_server() -> int:
    from mmrpc.train import registry

    return registry._served["parameters"].progress().step


def test_a_quorum_drops_who_is_late(tmp_path) -> None:
    """Two of three make the step; the third hears that its gradient was not used."""
    progress, *answers = run(work_quorum, 4, str(tmp_path))
    (late,) = answers[2]
    assert not late.is_used
    assert late.staleness == 1
    assert late.parameters.version == 1
    assert all(answer.is_used for trainer in answers[:2] for answer in trainer)
    assert (progress.step, progress.dropped) == (1, 1)


# Mistakes.


def work_mistakes(rank: int, directory: str) -> Any:
    if rank == 0:
        with ParameterServer(model(), adam, directory) as server:
            second = outcome(lambda: ParameterServer(model(), adam, directory))
            assert server.wait(90)
        return second, os.listdir(directory)
    other = outcome(lambda: Trainer(nn.Linear(2, 2), SERVER))
    nobody = outcome(lambda: Trainer(model(), SERVER, name="nobody", join_timeout_s=1))
    trainer = Trainer(model(), SERVER)
    with Trainer(model(), SERVER):
        loss_of(trainer.module, *samples(0)).backward()
        replaced = outcome(trainer.step)
    return other, nobody, replaced


def test_mistakes_are_typed(tmp_path) -> None:
    """Another module, a server that is not there and a replaced trainer are told apart."""
    (second, _), (other, nobody, replaced) = run(work_mistakes, 2, str(tmp_path))
    assert other.cls is LayoutError
    assert "the module of worker1 lacks '0.weight'" in other.message
    assert nobody.cls is MmrpcError
    assert "no parameter server 'nobody'" in nobody.message
    assert "was replaced by another" in replaced.message
    assert "another parameter server uses it" in second.message or "already" in second.message
