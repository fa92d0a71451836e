"""Plain tensors by value to another process on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed.rpc as torch_rpc

import mmrpc.rpc as rpc
from benchmarks.harness import Line
from benchmarks.lines import raw
from benchmarks.lines.callee import keep, total, total_kept
from benchmarks.lines.places import Places


def lines(places: Places) -> Iterator[Line]:
    """Lines of growing size, in a world of two workers, of which the first sends."""
    for mib in (1, 16) if places.quick else (1, 2, 4, 8, 16, 64):
        yield one_shot(mib)


def one_shot(mib: int) -> Line:
    """A tensor that is nowhere yet but here, read once there."""
    x = torch.ones(mib << 18)
    return Line(
        f"a plain tensor of {mib} MiB to another process, read once",
        {
            "mmrpc": lambda: rpc.rpc_sync("worker1", total, (x,)),
            "limit": _warm_slot(x, mib),
            "plain torch RPC": lambda: torch_rpc.rpc_sync("worker1", total, (x,)),
        },
        calls=max(1, 16 // mib),
        how_limit="copied into memory that both keep mapped, its name by torch's RPC",
    )


def _warm_slot(x: torch.Tensor, mib: int) -> Callable[[], None]:
    path = f"/dev/shm/mmrpc-bench-{os.getpid()}-{mib}"
    slot = raw.write_tensor(path, x, reserve=False)
    torch_rpc.rpc_sync("worker1", keep, (path, tuple(x.shape)))
    os.unlink(path)

    def run() -> None:
        slot.copy_(x)
        torch_rpc.rpc_sync("worker1", total_kept, (path,))

    return run
