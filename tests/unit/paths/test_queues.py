"""Tensors in mounts and the children of a node that know no mounts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from mmrpc import MemoryMappedTensor
from mmrpc.core.resolver import set_resolver
from mmrpc.paths.mounts import Mount, MountTable
from mmrpc.paths.resolver import ClusterResolver


@pytest.fixture(autouse=True)
def _node(root: Path) -> Iterator[None]:
    table = MountTable([Mount("data", str(root), "write")], node="a")
    before = set_resolver(ClusterResolver(table, proven={}))
    yield
    set_resolver(before)


def add_one(tasks: Any, results: Any) -> None:
    tensor = tasks.get()
    tensor += 1
    results.put(tensor.sum().item())
    tasks.get()  # until the parent has looked


def test_a_spawned_child_gets_the_same_memory(root: Path) -> None:
    """Through a queue, tensor and plain view arrive at a fresh interpreter by reference."""
    tensor = MemoryMappedTensor.from_tensor(torch.zeros(4), filename=root / "x")
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    child = context.Process(target=add_one, args=(tasks, results), daemon=True)
    child.start()
    try:
        tasks.put(tensor.view(2, 2))
        assert results.get(timeout=90) == 4
        assert tensor.tolist() == [1, 1, 1, 1]
        tasks.put(None)
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
