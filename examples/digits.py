"""One parameter server and some trainers learn handwritten digits.

    mmrpc launch configs/digits.yaml
    mmrpc launch configs/digits.yaml -- --steps 1000 --consistency published

The config starts `serve` on one worker and `train` on the others. Parameters and gradients are
mapped: what is sent for a step is the notice that a gradient is there. Then the same training
runs through torch's own RPC, to compare.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from torch import nn

from examples.plain_parameter_server import PlainServer, PlainTrainer
from mmrpc import rpc
from mmrpc.train import ParameterServer, Trainer

SERVER = "ps0"
HELD_OUT = 360
BATCH = 64
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Job:
    """What to train; every worker has the same."""

    trainers: int
    steps: int = 300
    hidden: int = 512
    consistency: str = "live"

    @classmethod
    def from_arguments(cls) -> Job:
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, default=cls.steps)
        parser.add_argument("--hidden", type=int, default=cls.hidden)
        parser.add_argument("--consistency", default=cls.consistency)
        options = vars(parser.parse_args())
        return cls(int(os.environ["WORLD_SIZE"]) - 1, **options)


@dataclass(frozen=True)
class Result:
    """What one way of training came to."""

    steps_per_s: float
    accuracy: float
    nbytes_per_step: int


# The model and its data: every worker makes the same.


def classifier(job: Job) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, job.hidden),
        nn.ReLU(),
        nn.Linear(job.hidden, job.hidden),
        nn.ReLU(),
        nn.Linear(job.hidden, 10),
    )


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (torch.from_numpy(pixels).float() / 16)[order], torch.from_numpy(labels)[order]


def batches(job: Job, trainer: int) -> Any:
    """The batches of one trainer, each from its own share of the digits."""
    pixels, labels = (part[HELD_OUT:][trainer :: job.trainers] for part in load_digits())
    generator = torch.Generator().manual_seed(trainer)
    for _ in range(job.steps):
        rows = torch.randint(len(pixels), (BATCH,), generator=generator)
        yield pixels[rows], labels[rows]


def accuracy(module: nn.Module) -> float:
    pixels, labels = (part[:HELD_OUT] for part in load_digits())
    with torch.no_grad():
        return (module(pixels).argmax(1) == labels).float().mean().item()


# With mapped parameters and gradients.


_told_nbytes = 0


def tell_nbytes(nbytes: int) -> None:
    """Runs on the server's worker, for its progress line."""
    global _told_nbytes
    _told_nbytes = nbytes


def run_server(job: Job, directory: str) -> Result:
    module = classifier(job)
    with ParameterServer(
        module, optimizer, directory, trainers=job.trainers, consistency=job.consistency
    ) as server:
        began_s, began = time.perf_counter(), 0
        first_s = None
        while not server.wait(0.5):
            now_s, step = time.perf_counter(), server.step_number
            if step == 0:
                began_s = now_s
                continue
            first_s = first_s or began_s
            report(server, job, (step - began) / (now_s - began_s))
            began_s, began = now_s, step
        took_s = time.perf_counter() - (first_s or began_s)
        report(server, job, server.step_number / took_s)
        return Result(server.step_number / took_s, accuracy(module), _told_nbytes)


def report(server: ParameterServer, job: Job, steps_per_s: float) -> None:
    progress = server.progress()
    loss = "" if progress.loss is None else f"  loss {progress.loss:.3f}"
    print(
        f"step {progress.step:4}/{job.steps}  {steps_per_s:6.1f} steps/s{loss}"
        f"  staleness {progress.staleness:.2f}  RPC {_told_nbytes:,} B/step",
        flush=True,
    )


def run_trainer(job: Job, trainer_number: int) -> None:
    with Trainer(classifier(job), SERVER) as trainer:
        print(f"joined {SERVER}: {trainer.link}")
        for number, (pixels, labels) in enumerate(batches(job, trainer_number)):
            loss = nn.functional.cross_entropy(trainer.module(pixels), labels)
            loss.backward()
            sent = trainer.push_nbytes() if number % 100 == 0 else 0
            answer = trainer.step(loss=loss.item())
            if sent and trainer_number == 0:
                rpc.rpc_sync(SERVER, tell_nbytes, (sent + rpc.message_nbytes(print, (answer,)),))


# Through torch's own RPC.


_finished: list[float] = []


def finish(nbytes: int) -> None:
    """Runs on the server's worker when a trainer is through."""
    tell_nbytes(nbytes)
    _finished.append(time.perf_counter())


def run_plain_server(job: Job) -> PlainServer:
    return PlainServer(classifier(job), optimizer, job.trainers)


def run_plain_trainer(job: Job, trainer_number: int) -> float:
    trainer = PlainTrainer(classifier(job), SERVER)
    began_s = time.perf_counter()
    for pixels, labels in batches(job, trainer_number):
        nn.functional.cross_entropy(trainer.module(pixels), labels).backward()
        trainer.step()
    torch_rpc.rpc_sync(SERVER, finish, (trainer.message_nbytes(),))
    return time.perf_counter() - began_s


# What the config starts.


def serve() -> None:
    job = Job.from_arguments()
    torch.set_num_threads(1)
    rpc.init_rpc()
    with tempfile.TemporaryDirectory(prefix="mmrpc-digits-", dir=params_mount()) as directory:
        ours = run_server(job, directory)
        rpc.shutdown()
    print("the same through torch's own RPC ...", flush=True)
    server = run_plain_server(job)
    began_s = join_plain()
    torch_rpc.shutdown()
    plain = Result(job.steps / (max(_finished) - began_s), accuracy(server.module), _told_nbytes)
    compare(ours, plain)
    if ours.accuracy < 0.9:
        raise SystemExit("the held-out accuracy should be above 90%")


def train() -> None:
    job = Job.from_arguments()
    torch.set_num_threads(1)
    rpc.init_rpc()
    number = int(os.environ["RANK"]) - 1
    run_trainer(job, number)
    rpc.shutdown()
    join_plain()
    run_plain_trainer(job, number)
    torch_rpc.shutdown()


def join_plain() -> float:
    """Joins a group of torch's own RPC, with its default transport; gives the time."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch_rpc.init_rpc(os.environ["MMRPC_WORKER"], rank=rank, world_size=world_size)
    return time.perf_counter()


def params_mount() -> str:
    from mmrpc.config import load_config

    node = os.environ["MMRPC_NODE"]
    return load_config(os.environ["MMRPC_CLUSTER"]).nodes[node].mounts["params"]


def compare(ours: Result, plain: Result) -> None:
    rows = [
        ("", "mmrpc, mapped", "torch RPC, sent"),
        ("steps/s", f"{ours.steps_per_s:.1f}", f"{plain.steps_per_s:.1f}"),
        ("RPC bytes a step and trainer", f"{ours.nbytes_per_step:,}", f"{plain.nbytes_per_step:,}"),
        ("held-out accuracy", f"{ours.accuracy:.1%}", f"{plain.accuracy:.1%}"),
    ]
    for name, *cells in rows:
        print(f"{name:30}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
