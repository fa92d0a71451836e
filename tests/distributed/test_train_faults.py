"""A training whose processes are killed, whose disk is full, whose calls time out."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmrpc import rpc
from mmrpc.errors import NoSpaceError, RpcTimeoutError
from mmrpc.train import ParameterServer, Trainer, latest
from mmrpc.train.state import TrainingState
from tests.distributed.test_train import (
    SERVER,
    adam,
    alone,
    assert_close,
    loss_of,
    model,
    samples,
    values,
)
from tests.distributed.workers import outcome, run
from tests.needs import needs

pytestmark = pytest.mark.timeout(180)


def backward(trainer: Trainer, step: int, part: slice = slice(None)) -> None:
    x, y = samples(step)
    loss_of(trainer.module, x[part], y[part]).backward()


# A trainer is killed.


def kill_in_backward(trainer: Trainer) -> None:
    """Dies when some of the gradients are in the slot and others are not."""

    def die(gradient: torch.Tensor) -> None:
        trainer.module[2].weight.grad.fill_(1e9)
        os.kill(os.getpid(), signal.SIGKILL)

    trainer.module[0].weight.register_hook(die)
    backward(trainer, 0)


def kill_after_push(trainer: Trainer) -> None:
    """Dies with its gradient whole, before it has seen the answer or just then."""
    backward(trainer, 3, slice(8, 16))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    trainer.step()
    os.kill(os.getpid(), signal.SIGKILL)


def work_killed_trainer(rank: int, directory: str, kill: Any) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        with ParameterServer(model(), adam, directory, trainers=2) as server:
            assert server.wait(90)
            result = values(server.module), server.step_number
        rpc.shutdown(graceful=False)
        return result
    trainer = Trainer(model(), SERVER)
    for step in range(3):
        backward(trainer, step, slice(8 * (rank - 1), 8 * rank))
        trainer.step()
    if rank == 2:
        kill(trainer)
    if kill is kill_after_push:
        while rpc.rpc_sync(SERVER, waiting) == 0:
            pass
    for step in range(3, 6):
        backward(
            trainer, step, slice(0, 8) if step == 3 and kill is kill_after_push else slice(None)
        )
        trainer.step()
    trainer.close()
    rpc.shutdown(graceful=False)
    return None


def waiting() -> int:
    """How many gradients wait for the next step, on the server's worker."""
    from mmrpc.train import registry

    return len(registry._served["parameters"]._rounds.waiting)


@pytest.mark.parametrize("kill", [kill_in_backward, kill_after_push])
def test_a_killed_trainer_is_left_behind(tmp_path, kill) -> None:
    """Training goes on without it: what was half written is in no step, what was whole is."""
    (ours, steps), *_ = run(
        work_killed_trainer, 3, str(tmp_path), kill, may_die=["worker2"], shutdown=False
    )
    assert steps == 6
    assert_close(ours, alone(adam, 6))


def work_all_killed(rank: int, directory: str) -> Any:
    if rank == 0:
        with ParameterServer(model(), adam, directory, update="async") as server:
            done = server.wait(90)
        rpc.shutdown(graceful=False)
        return done, server.progress().trainers
    trainer = Trainer(model(), SERVER)
    backward(trainer, 0)
    trainer.step()
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def test_a_server_notices_that_nobody_is_left(tmp_path) -> None:
    """Also when no trainer waits for another, the dead are not waited for."""
    (done, trainers), _ = run(
        work_all_killed, 2, str(tmp_path), may_die=["worker1"], shutdown=False
    )
    assert done
    assert trainers == 0


# The server is killed.


def work_killed_server(rank: int, directory: str, options: Any, last: int, die_in: int) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        made = TrainingState.step

        def step_and_die(state: TrainingState, buffers: Any) -> None:
            if state.step_number == die_in:
                state.module[0].weight.data.fill_(1e9)
                state.arena.tensors["optim/#steps"][0] += 1
                os.kill(os.getpid(), signal.SIGKILL)
            made(state, buffers)

        TrainingState.step = step_and_die
        with ParameterServer(model(), adam, directory, **options) as server:
            resumed = server.resumed_from
            assert server.wait(90)
            return values(server.module), resumed
    trainer = Trainer(model(), SERVER)
    steps = []
    for step in range(trainer.version, last):
        backward(trainer, step)
        error = outcome(trainer.step)
        if getattr(error, "cls", None) is not None:
            rpc.shutdown(graceful=False)
            return error.cls.__name__
        steps.append(trainer.version)
    trainer.close()
    rpc.shutdown()
    return steps


@pytest.mark.parametrize(
    ("options", "resumed"),
    [({"consistency": "published"}, 4), ({"snapshot_every": 3}, 3)],
    ids=["published", "live"],
)
def test_a_killed_server_goes_on(tmp_path, options, resumed: int) -> None:
    """Killed inside a step, it goes on from the last version, to the same numbers."""
    killed = run(
        work_killed_server, 2, str(tmp_path), options, 8, 4, may_die=["worker0"], shutdown=False
    )
    assert killed == [None, "PeerLostError"]
    assert latest(tmp_path).number == resumed
    (ours, found), steps = run(work_killed_server, 2, str(tmp_path), options, 8, -1)
    assert found == resumed
    assert steps == list(range(resumed + 1, 9))
    assert_close(ours, alone(adam, 8))


# The disk is full.


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system with room for some versions only."""
    directory = tmp_path / "disk"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(directory)], check=True)
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def work_full_disk(rank: int, directory: str) -> Any:
    torch.set_num_threads(1)
    path = Path(directory, "ballast")
    if rank == 0:
        with ParameterServer(model(), adam, directory, consistency="published") as server:
            assert server.wait(90)
            return values(server.module)
    with Trainer(model(), SERVER) as trainer:
        for step in range(6):
            backward(trainer, step)
            if step == 3:
                with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(4096))
                before = latest(directory).number, values(trainer.module)
                error = outcome(trainer.step)
                again = outcome(trainer.step)
                kept = (
                    latest(directory).number == before[0],
                    all(map(torch.equal, before[1], values(trainer.module))),
                )
                path.unlink()
            trainer.step()
    return error, again, kept


@needs("root")
def test_a_full_disk_is_typed_and_loses_nothing(small_disk) -> None:
    """The trainer hears of it; once there is room, the push is repeated and counts once."""
    ours, (error, again, kept) = run(work_full_disk, 2, str(small_disk))
    for raised in (error, again):
        assert raised.cls is NoSpaceError
        assert str(small_disk) in raised.message
    assert kept == (True, True)
    assert_close(ours, alone(adam, 6))


# A call times out.


def work_timeout(rank: int, directory: str) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        with ParameterServer(model(), adam, directory, trainers=2) as server:
            assert server.wait(90)
            return values(server.module), server.step_number
    if rank == 1:
        with Trainer(model(), SERVER, timeout_s=1) as trainer:
            backward(trainer, 5, slice(0, 8))
            late = outcome(trainer.step)  # the other has not pushed yet
            trainer.module.zero_grad()
            backward(trainer, 0, slice(0, 8))
            outcome(trainer.step)  # it is at the server now, and the other may come
            rpc.rpc_async("worker2", go)
            while True:
                answer = outcome(trainer.step)
                if getattr(answer, "cls", None) is not RpcTimeoutError:
                    return late.cls.__name__, answer.is_used
    with Trainer(model(), SERVER) as trainer:
        assert _go.wait(60)
        backward(trainer, 0, slice(8, 16))
        trainer.step()
    return None


_go = threading.Event()


def go() -> None:
    _go.set()


def test_a_push_that_was_given_up_is_replaced(tmp_path) -> None:
    """After a timeout and another backward, only the newer gradient is in the step."""
    (ours, steps), (late, is_used), _ = run(work_timeout, 3, str(tmp_path))
    assert late == "RpcTimeoutError"
    assert is_used
    assert steps == 1
    assert_close(ours, alone(adam, 1))


def work_repeat(rank: int, directory: str) -> Any:
    torch.set_num_threads(1)
    if rank == 0:
        with ParameterServer(nn.Linear(8, 1), adam, directory) as server:
            assert server.wait(90)
            return server.step_number
    with Trainer(nn.Linear(8, 1), SERVER) as trainer:
        backward(trainer, 0)
        taken = Trainer._take

        def lose_the_answer(self: Trainer, parameters: Any) -> None:
            Trainer._take = taken
            raise RpcTimeoutError("the answer was lost")

        Trainer._take = lose_the_answer
        error = outcome(trainer.step)
        return error.cls, trainer.step().is_used, trainer.version


def test_a_repeated_push_is_used_once(tmp_path) -> None:
    """When only the answer was lost, repeating the push gives it again and makes no step."""
    steps, (error, is_used, version) = run(work_repeat, 2, str(tmp_path))
    assert error is RpcTimeoutError
    assert is_used
    assert steps == version == 1
