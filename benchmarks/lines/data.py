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
SHAPE = (ROWS, 3, 32, 32)


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
    images = torch.randint(0, 255, SHAPE, dtype=torch.uint8)
    directory = os.path.join(places.memory, "dataset")
    ds = MappedDataset.from_tensors(directory, {"image": images})
    path = ds["image"].filename
    mapped = raw.map_tensor(path, SHAPE, images.dtype)
    rows: dict[str, Callable[[Any], Any]] = {
        **peer("numpy", lambda np: {"np.memmap": _numpy(np, path)}),
        **peer("tensordict", lambda m: {"tensordict": _tensordict(m, path)}),
        **peer("datasets", lambda m: {"HF datasets": _datasets(m, images, places)}),
    }
    count = 1_024 if places.quick else 4_096
    yield _per_item(ds, mapped, rows, count)
    yield _batched(ds, mapped, rows, count)


def _epoch(dataset: Dataset[Any], count: int, collate: Any = None) -> Callable[[], None]:
    sampler = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:count].tolist()
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=collate)

    def run() -> None:
        for _ in loader:
            pass

    return run


def _per_item(ds: MappedDataset, mapped: torch.Tensor, rows: Any, count: int) -> Line:
    return Line(
        f"DataLoader, {count:,} random rows of 3x32x32 uint8, item by item",
        {
            "mmrpc": _epoch(Items(ds.__getitem__), count),
            "limit": _epoch(Items(lambda i: {"image": mapped[i]}), count),
            **{name: _epoch(Items(get), count) for name, get in rows.items()},
        },
        1.3,
        how_limit="a plain tensor on the mapping, indexed",
    )


def _batched(ds: MappedDataset, mapped: torch.Tensor, rows: Any, count: int) -> Line:
    def gather(indices: Any) -> Any:
        return {"image": mapped.index_select(0, torch.tensor(indices))}

    def keep(batch: Any) -> Any:
        return batch

    return Line(
        f"DataLoader, {count:,} random rows of 3x32x32 uint8, in batches of {BATCH}",
        {
            "mmrpc": _epoch(ds, count, keep),
            "limit": _epoch(Batches(gather), count, keep),
            **{name: _epoch(Batches(get), count, keep) for name, get in rows.items()},
        },
        1.1,
        calls=16_384 // count,
        how_limit="index_select on the mapping",
        summary="DataLoader, in batches",
    )


def _numpy(np: Any, path: str) -> Callable[[Any], Any]:
    rows = np.memmap(path, dtype=np.uint8, mode="r+", shape=SHAPE)
    return lambda index: {"image": torch.as_tensor(rows[index])}


def _tensordict(module: Any, path: str) -> Callable[[Any], Any]:
    rows = module.MemoryMappedTensor.from_filename(path, torch.uint8, SHAPE)
    return lambda index: {"image": rows[index]}


def _datasets(module: Any, images: torch.Tensor, places: Places) -> Callable[[Any], Any]:
    """The same rows as a dataset of Hugging Face, loaded from disk, that gives tensors."""
    import pyarrow

    directory = places.fresh(places.memory)
    flat = pyarrow.array(images.numpy().reshape(-1))
    column = pyarrow.FixedSizeListArray.from_arrays(flat, images[0].numel())
    module.disable_progress_bars()
    table = module.table.InMemoryTable(pyarrow.table({"image": column}))
    module.Dataset(table).save_to_disk(directory)
    rows = module.load_from_disk(directory).with_format("torch", dtype=torch.uint8)
    return rows.__getitem__  # type: ignore[no-any-return]
