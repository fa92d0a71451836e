"""Datasets and trees as arguments of calls: references of constant size, checked on arrival."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

import mmrpc
from mmrpc import rpc
from mmrpc.core.system import host
from mmrpc.core.trees.arena import Tree
from mmrpc.data import MappedDataset, RemoteDataset, ResumableLoader
from mmrpc.errors import NotSharedError, PathNotFoundError, StaleReferenceError
from tests.distributed.workers import Raised, by_every_way, run

ROWS = 200


def columns(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))}


# What the callee runs.


def mean(ds: Any, *nested: Any) -> float:
    return sum(float(batch["x"].sum()) for batch in ResumableLoader(ds, 32)) / len(ds)


def whole_mean(ds: Any) -> float:
    return sum(
        float(batch["x"].sum()) for batch in ResumableLoader(ds, 32, rank=0, world_size=1)
    ) / len(ds)


def kind(ds: Any) -> str:
    return type(ds).__name__


def write(ds: MappedDataset) -> None:
    ds[3]["x"].fill_(7)


def shard_rows(ds: MappedDataset) -> list[int]:
    return ds.shard()["i"].tolist()


def first(tree: Tree) -> float:
    return float(tree["layer"]["t0"].sum())


def open_elsewhere() -> None:
    """From now on this worker takes itself for one on another host."""
    host.host_id = lambda: "0123456789abcdef"
    from mmrpc.core import resolver

    resolver.host.host_id = host.host_id


# What the caller runs.


def _call(rank: int, directory: str) -> Any:
    if rank:
        return None
    ds = MappedDataset.from_tensors(f"{directory}/ds", columns(ROWS))
    wanted = float(columns(ROWS)["x"].sum()) / ROWS
    ways = by_every_way(rpc, "worker1", whole_mean, ds)
    nested = rpc.rpc_sync("worker1", _nested, ({"train": [ds.shuffle(3)], "n": 1},))
    return ways, wanted, nested


def _nested(arguments: dict[str, Any]) -> float:
    return whole_mean(arguments["train"][0])


def test_a_dataset_is_an_argument(tmp_path: Path) -> None:
    """Whatever the way of the call and the depth, the callee reads the caller's rows."""
    ways, wanted, nested = run(_call, 2, str(tmp_path))[0]
    assert all(abs(value - wanted) < 1e-4 for value in (*ways.values(), nested))


def _sizes(rank: int, directory: str) -> Any:
    if rank:
        return None
    small = MappedDataset.from_tensors(f"{directory}/aaaaa", columns(10))
    large = MappedDataset.from_tensors(f"{directory}/bbbbb", columns(300_000))
    sizes = [rpc.message_nbytes(mean, (ds.shuffle(1),)) for ds in (small, large)]
    few = mmrpc.save_tree(f"{directory}/ccccc", {"layer": {"t0": torch.ones(2)}}, arena=True)
    tensors = {f"t{i}": torch.full((3,), float(i)) for i in range(10_000)}
    many = mmrpc.save_tree(f"{directory}/ddddd", {"layer": tensors}, arena=True)
    sizes += [rpc.message_nbytes(first, (tree,)) for tree in (few, many)]
    assert rpc.rpc_sync("worker1", first, (few,)) == 2
    return sizes, rpc.rpc_sync("worker1", first, (many,))


def test_messages_do_not_grow(tmp_path: Path) -> None:
    """A dataset of any length, and a tree of 10,000 tensors, is a few hundred bytes."""
    sizes, value = run(_sizes, 2, str(tmp_path))[0]
    assert value == 0
    assert max(sizes) < 1000
    assert abs(sizes[0] - sizes[1]) < 64
    assert abs(sizes[2] - sizes[3]) < 64


def _failures(rank: int, directory: str) -> Any:
    if rank:
        return None
    found = {}
    ds = MappedDataset.from_tensors(f"{directory}/ds", columns(ROWS))
    tree = mmrpc.save_tree(f"{directory}/tree", {"layer": {"t0": torch.ones(2)}}, arena=True)
    for name, value, function, path in (
        ("dataset", ds, whole_mean, f"{directory}/ds/x.memmap"),
        ("tree", tree, first, f"{directory}/tree/tree.arena"),
    ):
        os.rename(path, f"{path}.away")
        found[name, "gone"] = by_every_way(rpc, "worker1", function, value)
        Path(path).write_bytes(Path(f"{path}.away").read_bytes())
        found[name, "replaced"] = by_every_way(rpc, "worker1", function, value)
        os.replace(f"{path}.away", path)
        found[name, "back"] = by_every_way(rpc, "worker1", function, value)
    return found


def test_what_cannot_be_opened_is_told_to_the_caller(tmp_path: Path) -> None:
    """A missing or replaced file is the same typed error at the caller, by every way of a call."""
    found = run(_failures, 2, str(tmp_path))[0]
    for (_, what), ways in found.items():
        for outcome in ways.values():
            if what == "back":
                assert isinstance(outcome, float)
                continue
            assert isinstance(outcome, Raised), outcome
            wanted = PathNotFoundError if what == "gone" else StaleReferenceError
            assert issubclass(outcome.cls, wanted), outcome


def _private(rank: int, directory: str) -> Any:
    if rank:
        return None
    ds = MappedDataset.from_tensors(f"{directory}/ds", columns(ROWS))
    rpc.rpc_sync("worker1", write, (ds,))
    return bool((ds[3]["x"] == 7).any())


def test_a_callee_does_not_change_the_callers_rows(tmp_path: Path) -> None:
    """A dataset is opened as the sender had it: by default writes stay where they were made."""
    assert run(_private, 2, str(tmp_path))[0] is False


def _shards(rank: int, directory: str) -> Any:
    if rank:
        return None
    ds = MappedDataset.from_tensors(f"{directory}/ds", {"i": torch.arange(10)})
    return [rpc.rpc_sync(f"worker{other}", shard_rows, (ds,)) for other in range(3)]


def test_each_worker_has_its_shard(tmp_path: Path) -> None:
    """shard() without arguments is the part of this worker's rank."""
    parts = run(_shards, 3, str(tmp_path))[0]
    assert [row for part in parts for row in part] == list(range(10))
    assert {len(part) for part in parts} == {3, 4}


def _fall_back(rank: int, directory: str) -> Any:
    if rank:
        return None
    ds = MappedDataset.from_tensors(f"{directory}/ds", {"i": torch.arange(100)})
    near = rpc.rpc_sync("worker1", kind, (ds.share(fallback=True),))
    rpc.rpc_sync("worker1", open_elsewhere)
    alone = by_every_way(rpc, "worker1", kind, ds)
    without = by_every_way(rpc, "worker1", kind, ds.share())
    far = rpc.rpc_sync("worker1", read_remotely, (ds.share(fallback=True),))
    return near, alone, without, far


def read_remotely(ds: RemoteDataset) -> Any:
    loader = torch.utils.data.DataLoader(ds, batch_size=30)  # type: ignore[arg-type]
    batches = [batch["i"].tolist() for batch in loader]
    index_error = None
    try:
        ds[100]
    except IndexError as error:
        index_error = str(error)
    return {
        "kind": kind(ds),
        "length": len(ds),
        "columns": ds.columns,
        "row": int(ds[-1]["i"]),
        "slice": ds[2:5]["i"].tolist(),
        "gather": ds[[7, 3]]["i"].tolist(),
        "column": ds["i"].tolist() == list(range(100)),
        "batches": batches,
        "error": index_error,
    }


def test_a_node_that_cannot_open_it_asks_for_rows(tmp_path: Path) -> None:
    """Only if the sender said so, a node without the files gets rows through RPC, and is told."""
    with warnings.catch_warnings():
        near, alone, without, far = run(_fall_back, 2, str(tmp_path))[0]
    assert near == "MappedDataset"
    for ways in (alone, without):
        assert all(issubclass(outcome.cls, NotSharedError) for outcome in ways.values())
    assert far["kind"] == "RemoteDataset"
    assert (far["length"], far["columns"]) == (100, ("i",))
    assert (far["row"], far["slice"], far["gather"]) == (99, [2, 3, 4], [7, 3])
    assert far["column"]
    assert [len(batch) for batch in far["batches"]] == [30, 30, 30, 10]
    assert [row for batch in far["batches"] for row in batch] == list(range(100))
    assert "out of bounds" in far["error"] or "100" in far["error"]
