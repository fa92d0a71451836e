"""Loading what is on disk: state dicts of many tensors, and one tensor out of many."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

import mmrpc
from benchmarks.harness import Line
from benchmarks.lines import raw
from benchmarks.lines.peers import installed, peer
from benchmarks.lines.places import Places

COUNT = 2_000


def lines(places: Places) -> Iterator[Line]:
    """Lines of loading; files are in the page cache."""
    yield _load(places)
    if installed("safetensors"):
        yield _one_of_many(places, 4 if places.quick else 16)


def _load(places: Places) -> Line:
    tensors = {f"layer{i}.weight": torch.full((16,), float(i)) for i in range(COUNT)}
    arena, bare = places.fresh(places.disk), places.fresh(places.disk)
    mmrpc.save_tree(arena, tensors, arena=True)
    rows = [(name, tuple(t.shape), 16 * i) for i, (name, t) in enumerate(tensors.items())]
    raw.write_tensor(bare, torch.cat(list(tensors.values())), reserve=False)
    with open(f"{bare}.table", "wb") as file:
        pickle.dump(rows, file)

    def limit() -> None:
        flat = raw.map_tensor(bare, (16 * COUNT,), torch.float32)
        with open(f"{bare}.table", "rb") as file:
            table = pickle.load(file)
        assert len({name: flat.as_strided(s, (1,), at) for name, s, at in table}) == COUNT

    def ours() -> None:
        assert len(mmrpc.load_tree(arena).to_dict()) == COUNT

    return Line(
        f"load {COUNT:,} tensors of 64 bytes, all of them",
        {
            "mmrpc": ours,
            "limit": limit,
            **peer("tensordict", lambda m: {"tensordict": _tensordict(places, m, tensors)}),
            **peer(
                "safetensors.torch",
                lambda m: {"safetensors": _saved(places, tensors, m.save_file, m.load_file)},
            ),
            "torch.load, mapped": _saved(places, tensors, torch.save, _torch_load),
        },
        calls=1 if places.quick else 3,
        how_limit="one mapping, a pickled table, as_strided for each",
        summary="load 2,000 small tensors",
    )


def _saved(places: Places, tensors: Any, save: Any, load: Any) -> Callable[[], None]:
    path = places.fresh(places.disk)
    save(tensors, path)

    def run() -> None:
        assert len(load(path)) == COUNT

    return run


def _torch_load(path: str) -> Any:
    return torch.load(path, mmap=True, weights_only=True)


def _tensordict(places: Places, module: Any, tensors: Any) -> Callable[[], None]:
    directory = places.fresh(places.disk)
    module.TensorDict(tensors).memmap(directory)

    def run() -> None:
        assert len(list(module.TensorDict.load_memmap(directory).keys())) == COUNT

    return run


def _one_of_many(places: Places, count: int) -> Line:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = places.fresh(places.disk) + ".safetensors"
    save_file({f"layer{i}": torch.ones(4 << 20) for i in range(count)}, path)

    def ours() -> None:
        mmrpc.open(path, "layer1").sum()

    def theirs() -> None:
        with safe_open(path, "pt") as file:
            file.get_tensor("layer1").sum()

    def limit() -> None:
        with open(path, "rb") as file:
            start = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(start))["layer1"]
        flat = raw.map_tensor(path, (os.path.getsize(path),), torch.uint8)
        first, last = (8 + start + offset for offset in entry["data_offsets"])
        flat[first:last].view(torch.float32).view(entry["shape"]).sum()

    return Line(
        f"one tensor of 16 MiB out of a .safetensors file of {count}, read",
        {"mmrpc": ours, "limit": limit, "safetensors": theirs},
        calls=2 if places.quick else 5,
        how_limit="the header as JSON, one mapping, a slice of it",
    )
