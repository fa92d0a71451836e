"""What a training refuses: arguments, changed modules, forks, servers that are stopped or gone."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mmrpc import rpc
from mmrpc.errors import PathExistsError
from mmrpc.train import ParameterServer, Trainer
from tests.distributed.test_train import SERVER, adam, loss_of, model, samples
from tests.distributed.workers import Raised, outcome, run

pytestmark = pytest.mark.timeout(180)
NAN = float("nan")


def serve(directory: str, **options: Any) -> Any:
    return lambda: ParameterServer(model(), adam, directory, **options)


def push(trainer: Trainer, **options: Any) -> Any:
    loss_of(trainer.module, *samples(0)).backward()
    return outcome(lambda: trainer.step(**options))


def assert_named(raised: dict[tuple[str, str], Any]) -> None:
    for (name, value), error in raised.items():
        assert isinstance(error, Raised), (name, value)
        assert error.cls.__name__ == "ConfigError", (name, value, error)
        assert error.key == name, (name, value)


def each(call: Any, values: dict[str, list[Any]]) -> dict[tuple[str, str], Any]:
    return {
        (name, repr(value)): outcome(lambda: call(**{name: value}))  # noqa: B023
        for name, choices in values.items()
        for value in choices
    }


def work_arguments(rank: int, directory: str) -> Any:
    if rank:
        return None
    made = each(
        lambda **options: serve(directory, **options)(),
        {
            "consistency": [None, "both"],
            "update": ["x"],
            "trainers": [0, True],
            "max_grad_norm": [NAN, 0, -1, float("inf")],
            "snapshot_every": [0, 1.5],
            "keep": [0, NAN],
            "durable": ["no"],
            "resume": [1],
            "name": ["", None],
        },
    )
    left = os.path.exists(directory)
    with serve(directory)() as server:
        again = outcome(serve(directory + "/b"))
        twice = outcome(serve(directory, name="other"))
        waited = each(server.wait, {"timeout_s": [NAN, -1]})
        joined = each(
            lambda **options: Trainer(model(), **{"server": SERVER, **options}),
            {
                "server": [None, ""],
                "name": [5],
                "by_value": [1],
                "timeout_s": [NAN, -1, True],
                "join_timeout_s": [NAN, None],
            },
        )
        with Trainer(model(), SERVER) as trainer:
            stepped = each(
                trainer.step,
                {
                    "loss": ["1", torch.ones(3), 1j],
                    "weight": [NAN, float("inf"), 0, -1, None],
                },
            )
            losses = []
            for loss in (1.0, NAN, torch.tensor(2.0, requires_grad=True)):
                push(trainer, loss=loss)
                losses.append(repr(server.progress().loss))
        closed = [outcome(call) for call in (trainer.step, trainer.pull, trainer.zero_grad)]
        trainer.close()
        free = outcome(lambda: Trainer(model(), SERVER, name="none", join_timeout_s=0))
    return made | waited | joined | stepped, left, again, twice, losses, closed, free


def test_arguments_are_refused_by_name(tmp_path) -> None:
    """Each is a typed error before anything is made, and the training goes on."""
    named, left, again, twice, losses, closed, free = run(
        work_arguments, 1, str(tmp_path / "training")
    )[0]
    assert_named(named)
    assert not left
    assert "has a parameter server 'parameters' already" in again.message
    assert not (tmp_path / "training" / "b").exists()
    assert twice.cls is PathExistsError
    assert losses == ["1.0", "nan", "2.0"]
    assert all("the trainer was closed" in error.message for error in closed)
    assert "there is no parameter server 'none'" in free.message


def work_fork(rank: int, directory: str) -> Any:
    with serve(directory)() as server, Trainer(model(), SERVER, timeout_s=30) as trainer:
        loss_of(trainer.module, *samples(0)).backward()
        before = [p.grad.clone() for p in trainer.module.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            os._exit(_in_child(trainer))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        kept = [
            torch.equal(g, p.grad) for g, p in zip(before, trainer.module.parameters(), strict=True)
        ]
        return status, kept, trainer.step().is_used, server.step_number


def _in_child(trainer: Trainer) -> int:
    signal.alarm(30)
    trainer.module(torch.ones(1, 8)).sum().backward()
    error = outcome(trainer.step)
    trainer.close()
    return 0 if "is of the parent process" in str(getattr(error, "message", "")) else 1


def test_a_forked_child_is_no_trainer(tmp_path) -> None:
    """Its backward does not reach its parent's gradients, and its step is an error, no hang."""
    status, kept, is_used, steps = run(work_fork, 1, str(tmp_path))[0]
    assert status == 0
    assert all(kept)
    assert is_used
    assert steps == 1


def work_stopped(rank: int, directory: str) -> Any:
    if rank == 0:
        with serve(directory)() as server:
            assert server.wait(90)
            return server.step_number
    with Trainer(model(), SERVER, timeout_s=2) as trainer:
        push(trainer)
        pid = rpc.rpc_sync(SERVER, os.getpid)
        os.kill(pid, signal.SIGSTOP)
        try:
            late = push(trainer)
        finally:
            os.kill(pid, signal.SIGCONT)
        while isinstance(answer := outcome(trainer.step), Raised):
            assert answer.cls.__name__ == "RpcTimeoutError"
        return late.cls.__name__, answer.is_used, trainer.version


def test_a_stopped_server_is_a_timeout(tmp_path) -> None:
    """A server that hangs is an error in time; when it goes on, the push counts once."""
    steps, (late, is_used, version) = run(work_stopped, 2, str(tmp_path))
    assert late == "RpcTimeoutError"
    assert is_used
    assert steps == version == 2


def work_gone(rank: int, directory: str) -> Any:
    server = serve(directory, consistency="published")()
    with Trainer(model(), SERVER) as trainer:
        push(trainer)
        os.rename(directory, directory + "-away")
        lost = push(trainer)
        os.rename(directory + "-away", directory)
        found = outcome(trainer.step)
        server.close()
        closed = push(trainer)
    return lost, found.is_used, server.step_number, closed


def test_a_directory_that_goes_away_and_comes_back(tmp_path) -> None:
    """The step is made but not published; repeating the push publishes it, once."""
    lost, is_used, steps, closed = run(work_gone, 1, str(tmp_path / "training"))[0]
    assert lost.cls.__name__ == "PathNotFoundError"
    assert "training" in lost.message
    assert is_used
    assert steps == 2
    assert "there is no parameter server" in closed.message


def work_joins_twice(rank: int, directory: str) -> Any:
    with serve(directory)() as server:
        first, second = Trainer(model(), SERVER), Trainer(nn.Sequential(*model()), SERVER)
        replaced, used = push(first), push(second)
        first.close()
        again = push(second)
        second.close()
        return replaced, used.is_used, again.is_used, server.step_number


def test_a_trainer_that_joins_twice_is_one(tmp_path) -> None:
    """The later takes the place of the earlier, which hears of it and cannot make it leave."""
    replaced, used, again, steps = run(work_joins_twice, 1, str(tmp_path))[0]
    assert "was replaced by another of its name. Make a new Trainer" in replaced.message
    assert used
    assert again
    assert steps == 2
