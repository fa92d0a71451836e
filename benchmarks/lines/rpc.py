"""Calls between two processes on this machine, mapped tensors in their arguments."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc

import mmrpc.rpc as rpc
from benchmarks import harness
from benchmarks.harness import Line, Result
from benchmarks.lines import raw
from benchmarks.lines.peers import peer
from benchmarks.lines.places import Places
from mmrpc import MemoryMappedTensor
from mmrpc.testing import run_workers

_kept: dict[str, torch.Tensor] = {}


def results(places: Places, rounds: int) -> list[Result]:
    """Measures in a world of two workers, of which the first asks."""
    found: list[Result] = run_workers(
        _world, 2, places.disk, places.memory, places.quick, rounds, timeout_s=1500
    )[0]
    return found


def _world(rank: int, disk: str, memory: str, quick: bool, rounds: int) -> list[Result]:
    if rank:
        return []
    places = Places(disk, os.path.join(memory), quick)
    return [
        *harness.run(_lines(places), rounds, lambda text: print(" ", text, flush=True)),
        _idle(places),
    ]


def _lines(places: Places) -> Iterator[Line]:
    small = MemoryMappedTensor.zeros(256, filename=f"{places.memory}/small.bin")
    big_mib = 64 if places.quick else 256
    big = MemoryMappedTensor.from_tensor(
        torch.ones(big_mib << 18), filename=f"{places.memory}/big.bin"
    )
    yield _untouched("RPC with a mapped tensor of 1 KiB, not touched", small)
    yield _untouched(f"RPC with a mapped tensor of {big_mib} MiB, not touched", big)
    yield _read(big, big_mib)
    for mib in (1, 16) if places.quick else (1, 4, 16, 64, 256):
        yield _one_shot(mib)


def _untouched(name: str, x: torch.Tensor) -> Line:
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
    )


def _one_shot(mib: int) -> Line:
    x = torch.ones(mib << 18)
    return Line(
        f"a plain tensor of {mib} MiB to another process, read once",
        {
            "mmrpc": lambda: rpc.rpc_sync("worker1", total, (x,)),
            "limit": _warm_slot(x, mib),
            "plain torch RPC": lambda: torch_rpc.rpc_sync("worker1", total, (x,)),
        },
        1.2 if mib == 256 else None,
        how_limit="copied into memory that both keep mapped, and its name by torch's RPC",
    )


def _warm_slot(x: torch.Tensor, mib: int) -> Any:
    path = f"/dev/shm/mmrpc-bench-{os.getpid()}-{mib}"
    slot = raw.write_tensor(path, x, reserve=False)
    torch_rpc.rpc_sync("worker1", keep, (path, tuple(x.shape)))
    os.unlink(path)

    def run() -> None:
        slot.copy_(x)
        torch_rpc.rpc_sync("worker1", total_kept, (path,))

    return run


def _idle(places: Places) -> Result:
    """CPU seconds that each worker burns in a second in which nothing is asked of it."""
    seconds = 2.0 if places.quick else 10.0
    before = rpc.rpc_sync("worker1", cpu_s)
    time.sleep(seconds)
    burned = (rpc.rpc_sync("worker1", cpu_s) - before) / seconds
    result = Result("CPU of an idle RPC process", None, "", f"{burned * 100:.2f}% of a core")
    result.wall_s = {"mmrpc": [burned]}
    return result


def nothing(x: object) -> None:
    """Runs on the callee."""


def total(x: torch.Tensor) -> float:
    """Runs on the callee: reads all."""
    return float(x.sum())


def keep(name: str, shape: tuple[int, ...]) -> None:
    """Runs on the callee: maps a file once and for all."""
    _kept[name] = raw.map_tensor(name, shape, torch.float32)


def total_kept(name: str) -> float:
    """Runs on the callee: reads what it kept."""
    return float(_kept[name].sum())


def cpu_s() -> float:
    """Runs on the callee: CPU seconds of its process."""
    return time.process_time()
