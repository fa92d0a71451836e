"""Rows of a dataset, by itself and through torch's DataLoader."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Line
from benchmarks.lines import raw
from benchmarks.lines.peers import peer
from benchmarks.lines.places import Places
from mmrpc.data import MappedDataset

ROWS, BATCH = 20_000, 256


class Items(Dataset[Any]):
    """Rows of something that can be indexed, one at a time."""

    def __init__(self, get: Callable[[int], Any]) -> None:
        self._get = get

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self._get(index)


class Batches(Items):
    """The same, a list of rows at a time."""

    def __getitems__(self, indices: list[int]) -> Any:
        return self._get(indices)  # type: ignore[arg-type]


def lines(places: Places) -> Iterator[Line]:
    """Lines of reading a dataset in random order."""
    images = torch.randint(0, 255, (ROWS, 3, 32, 32), dtype=torch.uint8)
    directory = os.path.join(places.memory, "dataset")
    ds = MappedDataset.from_tensors(directory, {"image": images})
    path = ds["image"].filename
    mapped = raw.map_tensor(path, tuple(images.shape), images.dtype)
    yield _per_item(ds, mapped, path)
    yield _batched(ds, mapped, path)


def _sampler() -> list[int]:
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:4096].tolist()


def _epoch(dataset: Dataset[Any], collate: Any = None) -> Callable[[], None]:
    loader = DataLoader(dataset, batch_size=BATCH, sampler=_sampler(), collate_fn=collate)

    def run() -> None:
        for _ in loader:
            pass

    return run


def _per_item(ds: MappedDataset, mapped: torch.Tensor, path: str) -> Line:
    return Line(
        "DataLoader, 4,096 random rows of 3x32x32 uint8, item by item",
        {
            "mmrpc": _epoch(Items(ds.__getitem__)),
            "limit": _epoch(Items(lambda i: {"image": mapped[i]})),
            **peer("numpy", lambda np: {"np.memmap": _epoch(Items(_numpy_rows(np, path)))}),
            **_tensordict(path, lambda x: _epoch(Items(lambda i: {"image": x[i]}))),
        },
        1.3,
        how_limit="a plain tensor on the mapping, indexed",
    )


def _batched(ds: MappedDataset, mapped: torch.Tensor, path: str) -> Line:
    def gather(rows: list[int]) -> Any:
        return {"image": mapped.index_select(0, torch.tensor(rows))}

    def keep(batch: Any) -> Any:
        return batch

    return Line(
        "DataLoader, 4,096 random rows of 3x32x32 uint8, in batches of 256",
        {
            "mmrpc": _epoch(ds, keep),
            "limit": _epoch(Batches(gather), keep),  # type: ignore[arg-type]
            **peer(
                "numpy",
                lambda np: {"np.memmap": _epoch(Batches(_numpy_rows(np, path)), keep)},
            ),
            **_tensordict(path, lambda x: _epoch(Batches(lambda i: {"image": x[i]}), keep)),
        },
        1.1,
        calls=4,
        how_limit="index_select on the mapping",
    )


def _numpy_rows(np: Any, path: str) -> Callable[[Any], Any]:
    rows = np.memmap(path, dtype=np.uint8, mode="r+", shape=(ROWS, 3, 32, 32))
    return lambda index: {"image": torch.as_tensor(rows[index])}


def _tensordict(path: str, make: Callable[[Any], Any]) -> dict[str, Any]:
    def alternatives(module: Any) -> dict[str, Any]:
        x = module.MemoryMappedTensor.from_filename(path, torch.uint8, (ROWS, 3, 32, 32))
        return {"tensordict": make(x)}

    return peer("tensordict", alternatives)
