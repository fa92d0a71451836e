"""What grows and what does not: ``python -m benchmarks.scale [--quick] [--out DIR]``.

The cost of one operation against the size of a tensor, the number of tensors, and the number of
processes. Files are sparse, so that 16 GiB need no memory. For the number of nodes see
``benchmarks/handshake_scale.py``.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import mmrpc.rpc as rpc
from benchmarks import machine
from benchmarks.lines.places import Places, places
from benchmarks.report import duration
from mmrpc import MemoryMappedTensor, save_tree
from mmrpc.testing import run_workers

Row = tuple[str, ...]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def median_s(run: Callable[[], Any], calls: int, rounds: int = 7) -> float:
    """Seconds of a call: the median of some rounds of calls."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def nothing(x: object) -> None:
    """Runs on the worker that is called."""


def sizes(rank: int, directory: str, nbytes: Sequence[int]) -> list[Row]:
    """Opening, pickling and sending a tensor of growing size."""
    rows = []
    for n in nbytes if rank == 0 else ():
        path = os.path.join(directory, f"{n}.sparse")
        with open(path, "wb") as file:
            file.truncate(n)
        shape = (n // 4,)
        x = MemoryMappedTensor.from_filename(path, torch.float32, shape)
        opening = median_s(lambda: _open(path, shape), 200)  # noqa: B023
        pickling = median_s(lambda: pickle.loads(pickle.dumps(x)), 500)  # noqa: B023
        sending = median_s(lambda: rpc.rpc_sync("worker1", nothing, (x,)), 50)  # noqa: B023
        message = rpc.message_nbytes(nothing, (x,))
        rows.append(
            (_size(n), duration(opening), duration(pickling), duration(sending), f"{message} B")
        )
        os.unlink(path)
    return rows


def _open(path: str, shape: tuple[int, ...]) -> torch.Tensor:
    # Read-only, so that it is not the mapping that is there already.
    return MemoryMappedTensor.from_filename(path, torch.float32, shape, mode="r")


def counts(rank: int, directory: str, numbers: Sequence[int]) -> list[Row]:
    """Publishing and sending a growing number of small tensors."""
    rows = []
    for n in numbers if rank == 0 else ():
        tensors = {f"t{i}": torch.full((16,), float(i)) for i in range(n)}
        start = time.perf_counter()
        tree = save_tree(os.path.join(directory, f"tree{n}"), tensors, arena=True)
        publishing = time.perf_counter() - start
        start = time.perf_counter()
        rpc.rpc_sync("worker1", len, (tree,))
        first = time.perf_counter() - start
        again = median_s(lambda: rpc.rpc_sync("worker1", len, (tree,)), 20)  # noqa: B023
        message = rpc.message_nbytes(len, (tree,))
        rows.append(
            (f"{n:,}", duration(publishing), duration(first), duration(again), f"{message} B")
        )
    return rows


def workers(rank: int, path: str, count: int) -> Row | None:
    """A call with a mapped tensor to one of many workers, and to all of them at once."""
    if rank:
        return None
    x = MemoryMappedTensor.zeros(MIB // 4, filename=path)
    names = [f"worker{i}" for i in range(1, count)]

    def everyone() -> None:
        for call in [rpc.rpc_async(name, nothing, (x,)) for name in names]:
            call.wait()

    one = median_s(lambda: rpc.rpc_sync(names[-1], nothing, (x,)), 50)
    return str(count), duration(one), duration(median_s(everyone, 20))


def _size(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes // KIB} KiB"


def table(title: str, header: Row, rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lines = [f"**{title}**", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def measure(where: Places) -> str:
    """Measures all; gives the tables."""
    by_size = [KIB, MIB, 256 * MIB, 4 * GIB, 16 * GIB]
    by_count = [1, 100, 10_000] if where.quick else [1, 100, 10_000, 100_000]
    by_workers = [2, 4] if where.quick else [2, 4, 8, 16]
    found = [
        table(
            "Size of one tensor",
            ("size", "open and close", "pickle and unpickle", "RPC, not touched", "message"),
            run_workers(sizes, 2, where.disk, by_size, timeout_s=300)[0],
        ),
        table(
            "Number of tensors in a tree",
            ("tensors", "publish", "send, first time", "send again", "message"),
            run_workers(counts, 2, where.memory, by_count, timeout_s=600)[0],
        ),
    ]
    rows = [
        run_workers(workers, n, where.fresh(where.memory), n, timeout_s=300)[0] for n in by_workers
    ]
    header = ("processes", "RPC to one", "RPC to all others at once")
    found.append(table(f"Number of processes on {_cores()} cores", header, rows))
    return "\n".join(found)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def main() -> int:
    """Measures, prints, and writes the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller")
    parser.add_argument("--out", default="benchmarks/results", help="where the tables go")
    options = parser.parse_args()
    with places(options.quick) as where:
        text = measure(where)
    facts = ", ".join(f"{name} {value}" for name, value in machine.describe().items())
    text = f"Measured by `python -m benchmarks.scale` on: {facts}.\n\n{text}"
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, "scale.md")
    with open(path, "w") as file:
        file.write(text)
    print(text)
    print("written:", path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
