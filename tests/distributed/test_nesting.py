"""Chains of calls that are deeper than torch's thread pool."""

from __future__ import annotations

import pytest

from mmrpc import rpc
from tests.distributed.workers import run

DEPTH = 12
CHAINS = 6


def descend(depth: int, way: str) -> int:
    """Calls the other worker, which calls back, until the depth is reached."""
    if depth == 0:
        return 0
    to, args = f"worker{1 - rpc.get_worker_info().id}", (depth - 1, way)
    if way == "rpc_sync":
        return 1 + int(rpc.rpc_sync(to, descend, args))
    if way == "rpc_async":
        return 1 + int(rpc.rpc_async(to, descend, args).wait())
    return 1 + int(rpc.remote(to, descend, args).to_here())


def drive(rank: int) -> dict[str, list[int]]:
    if rank == 1:
        return {}
    found = {}
    for way in ("rpc_sync", "rpc_async", "remote"):
        chains = [rpc.rpc_async("worker1", descend, (DEPTH, way)) for _ in range(CHAINS)]
        found[way] = rpc.wait_all(chains)
    return found


@pytest.mark.parametrize("threads", [2, 3])
def test_chains_deeper_than_the_thread_pool_end(threads: int) -> None:
    """Several at a time, with two or three threads, by each way of calling."""
    options = {"num_worker_threads": threads, "rpc_timeout": 60}
    found = run(drive, 2, options=options)[0]
    assert found == dict.fromkeys(("rpc_sync", "rpc_async", "remote"), [DEPTH] * CHAINS)


def drive_callbacks(rank: int) -> list[int]:
    if rank == 1:
        return []
    chains = [
        rpc.rpc_async("worker1", descend, (0, "")).then(
            lambda done: rpc.rpc_sync("worker1", descend, (2, "rpc_sync")) + done.value()
        )
        for _ in range(40)
    ]
    found: list[int] = rpc.wait_all(chains)
    return found


def test_callbacks_may_call() -> None:
    """More of them at a time than torch has threads, which complete what they wait for."""
    options = {"num_worker_threads": 2, "rpc_timeout": 60}
    assert run(drive_callbacks, 2, options=options)[0] == [2] * 40
