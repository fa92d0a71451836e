"""A server and clients that `mmrpc launch` starts: each client sends a tensor without its bytes.

    mmrpc launch configs/local.yaml
    mmrpc launch configs/echo-ssh.yaml
    mmrpc launch configs/echo-slurm.yaml --sbatch --submit

All three run this file; only the config says where.
"""

from __future__ import annotations

import os

import torch

import mmrpc.rpc as rpc
from mmrpc import MemoryMappedTensor


def double(x: torch.Tensor) -> float:
    """Runs on the server, on the client's own pages: writes to them, and gives their sum."""
    x.mul_(2)
    return x.sum().item()


def serve() -> None:
    """The role ``server``: there until every client is done."""
    rpc.init_rpc()
    rpc.shutdown()


def ask() -> None:
    """The role ``client``: sends a reference and finds in its own tensor what the server wrote."""
    rpc.init_rpc()
    file = f"mount://scratch/echo-{os.environ['MMRPC_RUN_ID']}-{os.environ['MMRPC_WORKER']}"
    x = MemoryMappedTensor.ones(1 << 20, filename=file)
    try:
        message_nbytes = rpc.message_nbytes(double, (x,))
        total = rpc.rpc_sync("server0", double, (x,))
        print(
            f"sent {x.nbytes} bytes as {message_nbytes}; the server wrote {x[0].item():g}, "
            f"and found {total:g} in all"
        )
    finally:
        os.unlink(x.filename)
        rpc.shutdown()
