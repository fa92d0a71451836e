"""A parameter server and two trainers in one file: the smallest complete program.

    python examples/parameter_server.py

The server's parameters are in one mapped file; each trainer's backward writes its gradients where
the server reads them. A step sends some hundred bytes, whatever the size of the model.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile

import torch
import torch.multiprocessing as mp
from torch import nn

from mmrpc import rpc
from mmrpc.train import ParameterServer, Trainer

TRAINERS = 2
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def tell(line: object) -> None:
    """Prints a line with its end in one write, since the processes share their output."""
    print(f"{line}\n", end="", flush=True)


def serve(directory: str) -> None:
    with ParameterServer(make_model(), make_optimizer, directory, trainers=TRAINERS) as server:
        while not server.wait(timeout_s=0.5):
            tell(server.progress())
        tell(f"the last version is {server.version.filename}")


def train(rank: int) -> None:
    with Trainer(make_model(), "worker0") as trainer:
        torch.manual_seed(rank)
        for step in range(STEPS):
            x = torch.randn(32, 16)
            loss = nn.functional.mse_loss(trainer.module(x), x.sum(1, keepdim=True))
            loss.backward()
            trainer.step(loss=loss.item())
            if step % 50 == 0 or step == STEPS - 1:
                tell(f"worker{rank}: step {step}, loss {loss.item():.3f}")


def work(rank: int, port: int, directory: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TP_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=1 + TRAINERS)
    train(rank) if rank else serve(directory)
    rpc.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(work, (free_port(), directory), nprocs=1 + TRAINERS)
