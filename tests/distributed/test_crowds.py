"""Many calls at once, and proxies of RRefs that call on, with few threads of torch's."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mmrpc import MemoryMappedTensor, rpc
from tests.distributed.workers import run

LARGE = 1 << 20
ENV = {"MMRPC_SHARE_ABOVE_BYTES": str(1 << 20)}
DEPTH = 10


def back(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def in_threads(count: int, work: Any) -> list[str]:
    """The errors of as many threads that work at once."""
    errors: list[str] = []

    def run_one(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=run_one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    return errors


def crowd(rank: int) -> Any:
    peer = f"worker{1 - rank}"

    def work(number: int) -> None:
        mapped = MemoryMappedTensor.from_tensor(torch.full((100,), float(number)))
        plain = torch.full((LARGE,), float(number))
        for _ in range(5):
            assert torch.equal(rpc.rpc_sync(peer, back, (mapped,)), mapped)
        assert torch.equal(rpc.rpc_sync(peer, back, (plain,)), plain)

    return in_threads(64, work)


def test_64_threads_call_at_once() -> None:
    """From both sides, mapped and plain; each gets its own back."""
    assert run(crowd, 2, env=ENV) == [[], []]


class Link:
    """An object on one worker that makes the next one on the other."""

    def __init__(self) -> None:
        self.sum = MemoryMappedTensor.from_tensor(torch.zeros(4))

    def add(self, way: str, depth: int, value: torch.Tensor) -> torch.Tensor:
        """Adds at the end of a chain, and gives that sum."""
        if not depth:
            self.sum += value
            return self.sum
        proxy: Any = getattr(next_link(), way)(timeout=60)
        answer = proxy.add(way, depth - 1, value)
        if way == "rpc_sync":
            return answer
        return answer.wait() if way == "rpc_async" else answer.to_here()


def next_link() -> Any:
    return rpc.remote(1 - rpc.get_worker_info().id, Link)


def chains(rank: int) -> Any:
    if rank:
        return []
    value = MemoryMappedTensor.from_tensor(torch.ones(4))
    ways = ("rpc_sync", "rpc_async", "remote")

    def work(number: int) -> None:
        found = next_link().rpc_sync(timeout=60).add(ways[number % 3], DEPTH, value)
        assert found.tolist() == [1.0] * 4

    return in_threads(6, work)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore:num_worker_threads below 2")
def test_proxies_call_on_deeper_than_there_are_threads(threads: int) -> None:
    """Chains of objects to and fro, by each kind of proxy, several at once."""
    options = {"num_worker_threads": threads, "rpc_timeout": 60}
    assert run(chains, 2, options=options) == [[], []]
