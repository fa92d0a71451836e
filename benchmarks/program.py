"""An ordinary program of torch.distributed.rpc, run as it is or with its import swapped.

    python -m benchmarks.program {torch.distributed.rpc|mmrpc.rpc} RANK

Rank 0 reads sizes in MiB from standard input. For each it sends a plain tensor of that size to
rank 1, which sends twice its values back, and then it prints a line. It ends with its input.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch


def double(x: torch.Tensor) -> torch.Tensor:
    """Runs on rank 1."""
    return x * 2


def main(module: str, rank: int) -> None:
    """The program; only the name of the module differs."""
    rpc: Any = importlib.import_module(module)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        print("ready", flush=True)
        for line in sys.stdin:
            x = torch.ones(int(float(line) * (1 << 18)))
            y = rpc.rpc_sync("worker1", double, (x,))
            print(float(y[0]), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
