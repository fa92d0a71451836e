"""Datasets between hosts that have one directory at different places, and where they have none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmrpc
from mmrpc import rpc
from mmrpc.data import MappedDataset, RangeWriter, plan
from mmrpc.errors import MmrpcError
from tests.distributed import hosting
from tests.distributed.hosting import Host, describe, run, value
from tests.needs import needs

pytestmark = [needs("namespaces"), pytest.mark.timeout(180)]
HERE = "tests.distributed.test_data_hosts"
ROWS = 50


@pytest.fixture
def area() -> Iterator[Path]:
    with hosting.area() as path:
        for name in ("shared", "at-a", "at-b", "private"):
            (path / name).mkdir()
        yield path


def hosts(area: Path) -> dict[str, Host]:
    """Two hosts; `private` is a's alone."""
    shared, private = str(area / "shared"), str(area / "private")
    at_a, at_b = str(area / "at-a"), str(area / "at-b")
    return {
        "a": Host({"data": at_a}, {shared: at_a}),
        "b": Host({"data": at_b}, {shared: at_b}, hides=(private,)),
    }


# What runs on b.


def sums(ds: Any) -> tuple[str, int, str]:
    """The kind, the sum of all rows, and where they are on this host if they are in order."""
    total = int(ds[list(range(len(ds)))]["y"].sum())
    is_whole = isinstance(ds, MappedDataset) and len(ds) == ROWS
    where = ds["y"].filename if is_whole else ""
    return type(ds).__name__, total, where


def sums_of_name(url: str) -> tuple[str, int, str]:
    return sums(MappedDataset(url))


def tree_sum(tree: Any) -> tuple[float, str]:
    return float(sum(t.sum() for t in tree.values())), tree.filename


def write_range(directory: str, start: int, stop: int) -> None:
    with RangeWriter(directory, start, stop) as writer:
        writer.write({"y": torch.arange(start, stop)})


# What runs on a.


def job_send(at_a: str) -> Any:
    ds = MappedDataset.from_tensors(f"{at_a}/ds", {"y": torch.arange(ROWS)})
    tensors = {f"t{i}": torch.full((2,), float(i)) for i in range(100)}
    tree = mmrpc.save_tree(f"{at_a}/tree", tensors, arena=True)
    half = ds.shuffle(5).split(0.5, 0.5)[0]
    return (
        rpc.rpc_sync("b", sums, (ds,)),
        rpc.rpc_sync("b", sums, (half,)),
        int(half["y"].sum()),
        rpc.rpc_sync("b", sums_of_name, ("mount://data/ds",)),
        rpc.rpc_sync("b", tree_sum, (tree,)),
    )


def job_outside(private: str) -> Any:
    ds = MappedDataset.from_tensors(f"{private}/ds", {"y": torch.arange(ROWS)})
    try:
        refused: Any = rpc.rpc_sync("b", sums, (ds,))
    except MmrpcError as error:
        refused = describe(error)
    return refused, rpc.rpc_sync("b", sums, (ds.share(fallback=True),))


def job_write_together(at_a: str, at_b: str) -> Any:
    plan(f"{at_a}/ds", ROWS, {"y": (torch.int64, ())})
    there = rpc.rpc_async("b", write_range, (f"{at_b}/ds", 20, ROWS))
    write_range(f"{at_a}/ds", 0, 20)
    there.wait()
    ds = MappedDataset(f"{at_a}/ds")
    return ds["y"].tolist(), sorted(os.listdir(f"{at_a}/ds"))


def test_rows_are_read_through_the_receivers_own_mount(area: Path) -> None:
    """A dataset, a shuffled half of it, its name, and an arena open where the receiver has them."""
    at_a, at_b = str(area / "at-a"), str(area / "at-b")
    whole, half, half_sum, named, tree = value(
        run(area, hosts(area), f"{HERE}:job_send", at_a, mounts={"data": {"access": "write"}})
    )
    assert whole == named == ["MappedDataset", sum(range(ROWS)), f"{at_b}/ds/y.memmap"]
    assert half[:2] == ["MappedDataset", half_sum]
    assert tree == [float(2 * sum(range(100))), f"{at_b}/tree/tree.arena"]


def test_a_dataset_outside_the_mounts(area: Path) -> None:
    """It is refused with a reason, or its rows come by RPC if the sender allowed that."""
    refused, remote = value(
        run(
            area,
            hosts(area),
            f"{HERE}:job_outside",
            str(area / "private"),
            mounts={"data": {"access": "write"}},
        )
    )
    assert refused["type"] == "NotSharedError"
    assert remote == ["RemoteDataset", sum(range(ROWS)), ""]


def test_two_hosts_write_one_dataset(area: Path) -> None:
    """Each host writes its range through its own mount; together they are one dataset."""
    rows, names = value(
        run(
            area,
            hosts(area),
            f"{HERE}:job_write_together",
            str(area / "at-a"),
            str(area / "at-b"),
            mounts={"data": {"access": "write"}},
        )
    )
    assert rows == list(range(ROWS))
    assert names == ["meta.json", "y.memmap"]
