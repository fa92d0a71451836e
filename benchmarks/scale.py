"""What grows and what does not: the cost of an operation against sizes and numbers.

Size of a tensor, number of tensors, number of processes, and number of nodes, which are simulated.
Files are sparse, so that 16 GiB need no memory.
"""

from __future__ import annotations

import os
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import mmrpc.rpc as rpc
from benchmarks import handshake_scale
from benchmarks.harness import ROUNDS
from benchmarks.lines.callee import nothing
from benchmarks.lines.places import Places
from mmrpc import MemoryMappedTensor, save_tree
from mmrpc.testing import run_workers

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Point = dict[str, float]


def measure(where: Places) -> dict[str, Any]:
    """Measures all.

    Returns:
        A dict that JSON can hold: ``series``, a list of dicts with a title, what is on the axis
        (`against`, `xs`, and `labels` for people), and lists of ``seconds`` and of ``bytes``.
    """
    by_size = [KIB, 64 * KIB, 4 * MIB, 256 * MIB, 16 * GIB]
    by_count = [1, 100, 10_000] if where.quick else [1, 10, 100, 1_000, 10_000, 100_000]
    by_workers = [2, 4] if where.quick else [2, 4, 8, 16]
    by_nodes = [1, 10, 100] if where.quick else list(handshake_scale.SIZES)
    points = run_workers(sizes, 2, where.disk, by_size, timeout_s=300)[0]
    found = [_series("Size of one tensor", "size", by_size, points, _size)]
    points = run_workers(counts, 2, where.memory, by_count, timeout_s=600)[0]
    found.append(_series("Number of tensors in a tree", "tensors", by_count, points))
    points = [
        run_workers(workers, n, where.fresh(where.memory), n, timeout_s=300)[0] for n in by_workers
    ]
    cores = len(os.sched_getaffinity(0))
    found.append(_series(f"Number of processes on {cores} cores", "processes", by_workers, points))
    points = [_nodes(n) for n in by_nodes]
    found.append(
        _series("Number of nodes, simulated by threads of one process", "nodes", by_nodes, points)
    )
    return {"series": found}


def _series(
    title: str,
    against: str,
    xs: Sequence[int],
    points: Sequence[Point],
    label: Callable[[int], str] = "{:,}".format,
) -> dict[str, Any]:
    sized = {name for name in points[0] if name.startswith("message")}
    columns = {name: [point[name] for point in points] for name in points[0]}
    print(f"  {title}: {columns}", flush=True)
    return {
        "title": title,
        "against": against,
        "xs": list(xs),
        "labels": [label(x) for x in xs],
        "seconds": {name: column for name, column in columns.items() if name not in sized},
        "bytes": {name: column for name, column in columns.items() if name in sized},
    }


def _size(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes // KIB} KiB"


def median_s(run: Callable[[], Any], calls: int) -> float:
    """Seconds of a call: the median of some rounds of calls."""
    run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def sizes(rank: int, directory: str, nbytes: Sequence[int]) -> list[Point]:
    """Opening, pickling and sending a tensor of growing size."""
    points = []
    for n in nbytes if rank == 0 else ():
        path = os.path.join(directory, f"{n}.sparse")
        with open(path, "wb") as file:
            file.truncate(n)
        points.append(_sized(path, n))
        os.unlink(path)
    return points


def _sized(path: str, nbytes: int) -> Point:
    shape = (nbytes // 4,)
    x = MemoryMappedTensor.from_filename(path, torch.float32, shape)

    def open_() -> None:
        # Read-only, so that it is not the mapping that is there already.
        MemoryMappedTensor.from_filename(path, torch.float32, shape, mode="r")

    return {
        "open and close": median_s(open_, 200),
        "pickle and unpickle": median_s(lambda: pickle.loads(pickle.dumps(x)), 500),
        "RPC, not touched": median_s(lambda: rpc.rpc_sync("worker1", nothing, (x,)), 100),
        "message": rpc.message_nbytes(nothing, (x,)),
    }


def counts(rank: int, directory: str, numbers: Sequence[int]) -> list[Point]:
    """Publishing and sending a growing number of small tensors."""
    return [_counted(directory, n) for n in numbers] if rank == 0 else []


def _counted(directory: str, n: int) -> Point:
    tensors = {f"t{i}": torch.full((16,), float(i)) for i in range(n)}
    publishing, sending = [], []
    for number in range(ROUNDS if n <= 10_000 else 3):
        start = time.perf_counter()
        tree = save_tree(os.path.join(directory, f"tree{n}-{number}"), tensors, arena=True)
        published = time.perf_counter()
        rpc.rpc_sync("worker1", len, (tree,))
        sending.append(time.perf_counter() - published)
        publishing.append(published - start)
    return {
        "publish": statistics.median(publishing),
        "send, first time": statistics.median(sending),
        "send again": median_s(lambda: rpc.rpc_sync("worker1", len, (tree,)), 50),
        "message": rpc.message_nbytes(len, (tree,)),
    }


def workers(rank: int, path: str, count: int) -> Point | None:
    """A call with a mapped tensor to one of many workers, and to all of them at once."""
    if rank:
        return None
    x = MemoryMappedTensor.zeros(MIB // 4, filename=path)
    names = [f"worker{i}" for i in range(1, count)]

    def everyone() -> None:
        for call in [rpc.rpc_async(name, nothing, (x,)) for name in names]:
            call.wait()

    one = median_s(lambda: rpc.rpc_sync(names[-1], nothing, (x,)), 100)
    return {"RPC to one": one, "RPC to all others at once": median_s(everyone, 30)}


def _nodes(count: int) -> Point:
    found = handshake_scale.measure(count)
    return {
        "handshake of all": found.total_s,
        "coordinator, CPU": found.coordinator_s,
        "messages of a node": found.node_bytes,
    }
