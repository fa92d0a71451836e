"""A large embedding table on a server, of which trainers read and change a few rows at a time.

    python examples/sparse_embeddings.py

The table is mapped by all. A batch touches only the pages of its rows, and its gradient is those
rows alone, as torch gives them for ``nn.Embedding(..., sparse=True)``.
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
ROWS = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
WIDTH = 32
STEPS = 200
WORDS = 500  # that occur at all


class PairModel(nn.Module):
    """Learns which words go together: those with the same remainder of their number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (self.table(left) * self.table(right)).sum(1)


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters), lr=0.05)


def tell(line: str) -> None:
    """Prints a line with its end in one write, since the processes share their output."""
    print(f"{line}\n", end="", flush=True)


def serve(directory: str) -> None:
    model = PairModel()
    before = model.table.weight.detach().clone()
    with ParameterServer(
        model, make_optimizer, directory, update="async", trainers=TRAINERS
    ) as server:
        while not server.wait(timeout_s=0.5):
            pass
        changed = (model.table.weight != before).any(1).sum().item()
        tell(f"{server.step_number} steps changed {changed} of {ROWS:,} rows")
        tell(f"loss {server.progress().loss:.3f}")


def train(rank: int) -> None:
    with Trainer(PairModel(), "worker0") as trainer:
        torch.manual_seed(rank)
        for _ in range(STEPS):
            left, right = torch.randint(WORDS, (2, 64))
            together = (left % 2 == right % 2).float()
            loss = nn.functional.binary_cross_entropy_with_logits(
                trainer.module(left, right), together
            )
            loss.backward()
            nbytes = trainer.push_nbytes()
            trainer.step(loss=loss.item())
        tell(f"worker{rank}: pushes of {nbytes:,} B, a table of {ROWS * WIDTH * 4:,} B")


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
