"""Calls between two processes on this machine, mapped tensors in their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc

import mmrpc.rpc as rpc
from benchmarks.harness import Line
from benchmarks.lines.callee import keep, nothing, total, total_kept
from benchmarks.lines.peers import peer
from benchmarks.lines.places import Places
from mmrpc import MemoryMappedTensor


def lines(places: Places) -> Iterator[Line]:
    """Lines of calls, in a world of two workers, of which the first asks."""
    small = MemoryMappedTensor.zeros(256, filename=f"{places.memory}/small.bin")
    mib = 64 if places.quick else 256
    big = MemoryMappedTensor.from_tensor(torch.ones(mib << 18), filename=f"{places.memory}/big.bin")
    yield _untouched("RPC with a mapped tensor of 1 KiB, not touched", small)
    yield _untouched(f"RPC with a mapped tensor of {mib} MiB, not touched", big, summary=True)
    yield _by_value("RPC with a short string", "a" * 40)
    yield _by_value("RPC with a plain tensor of 1 KiB", torch.ones(256))
    yield _read(big, mib)


def _untouched(name: str, x: torch.Tensor, summary: bool = False) -> Line:
    def theirs(module: Any) -> dict[str, Any]:
        y = module.MemoryMappedTensor.from_filename(x.filename, x.dtype, x.shape)
        return {"tensordict": lambda: torch_rpc.rpc_sync("worker1", nothing, (y,))}

    return Line(
        name,
        {
            "mmrpc": lambda: rpc.rpc_sync("worker1", nothing, (x,)),
            "limit": lambda: torch_rpc.rpc_sync("worker1", nothing, ("a" * 40,)),
            **peer("tensordict", theirs),
        },
        1.15,
        calls=100,
        how_limit="torch's RPC with a short string",
        summary="RPC with a mapped tensor, not touched" if summary else "",
    )


def _by_value(name: str, value: Any) -> Line:
    return Line(
        name,
        {
            "mmrpc": lambda: rpc.rpc_sync("worker1", nothing, (value,)),
            "limit": lambda: torch_rpc.rpc_sync("worker1", nothing, (value,)),
        },
        calls=100,
        how_limit="the same by torch's RPC",
    )


def _read(x: torch.Tensor, mib: int) -> Line:
    def theirs(module: Any) -> dict[str, Any]:
        y = module.MemoryMappedTensor.from_filename(x.filename, x.dtype, x.shape)
        return {"tensordict": lambda: torch_rpc.rpc_sync("worker1", total, (y,))}

    name = x.filename
    torch_rpc.rpc_sync("worker1", keep, (name, tuple(x.shape)))
    return Line(
        f"RPC, {mib} MiB shared before, callee reads all of it",
        {
            "mmrpc": lambda: rpc.rpc_sync("worker1", total, (x,)),
            "limit": lambda: torch_rpc.rpc_sync("worker1", total_kept, (name,)),
            "plain torch RPC": lambda: torch_rpc.rpc_sync("worker1", total, (x.clone(),)),
            **peer("tensordict", theirs),
        },
        1.05,
        how_limit="the name by torch's RPC, a mapping that the callee kept",
        summary="RPC, the callee reads all of a shared tensor",
    )
