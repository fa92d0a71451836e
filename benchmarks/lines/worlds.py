"""Where lines are measured: in this process, or in the first worker of an RPC group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from benchmarks import harness
from benchmarks.harness import Line, Result
from benchmarks.lines.places import Places

Lines = Callable[[Places], Iterator[Line]]


def measure(lines: Lines, workers: int, places: Places, rounds: int) -> list[Result]:
    """Measures lines.

    Args:
        lines: A function that a new process can import; it makes the lines where they run.
        workers: Size of the RPC group that the lines need; 0 to measure in this process.
        places: Directories for files.
        rounds: Rounds that count.
    """
    if not workers:
        return list(harness.run(lines(places), rounds, _say))
    from mmrpc.testing import run_workers

    found: list[Result] = run_workers(
        _work, workers, workers, lines, places, rounds, timeout_s=1500
    )[0]
    return found


def _work(rank: int, workers: int, lines: Lines, places: Places, rounds: int) -> list[Result]:
    if rank:
        return []
    import torch.distributed.rpc as torch_rpc

    pids = [torch_rpc.rpc_sync(f"worker{i}", os.getpid) for i in range(1, workers)]
    return list(harness.run(lines(places), rounds, _say, pids))


def _say(text: str) -> None:
    print(" ", text, flush=True)
