"""Many small tensors: publishing them, and sending them in one call."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc

import mmrpc.rpc as rpc
from benchmarks.harness import Alternative, Line
from benchmarks.lines import raw
from benchmarks.lines.peers import peer
from benchmarks.lines.places import Places
from mmrpc import save_tree

Table = list[tuple[tuple[int, ...], int]]
_kept: dict[str, Any] = {}


def lines(places: Places) -> Iterator[Line]:
    """Lines of trees, in a world of two workers, of which the first sends."""
    count = 2_000 if places.quick else 10_000
    tensors = {f"layer{i}": torch.full((16,), float(i)) for i in range(count)}
    yield _publish(places, tensors)
    yield _send_new(places, tensors)
    yield _send_again(places, tensors)


def _publish(places: Places, tensors: dict[str, torch.Tensor]) -> Line:
    def ours() -> None:
        directory = places.fresh(places.disk)
        save_tree(directory, tensors, arena=True)
        shutil.rmtree(directory)

    def limit() -> None:
        path = places.fresh(places.disk)
        raw.write_tensor(path, torch.cat(list(tensors.values())), reserve=False)
        rows = [(name, "float32", tuple(t.shape), 64 * i) for i, (name, t) in named()]
        with open(path, "ab") as file:
            file.write(pickle.dumps(rows))
        os.unlink(path)

    def named() -> Iterator[tuple[int, tuple[str, torch.Tensor]]]:
        return enumerate(tensors.items())

    def theirs(module: Any) -> dict[str, Any]:
        def run() -> None:
            directory = places.fresh(places.disk)
            module.TensorDict(tensors).memmap(directory)
            shutil.rmtree(directory)

        return {"tensordict": run}

    def in_one(save: Callable[[Any, str], Any]) -> Callable[[], None]:
        def run() -> None:
            path = places.fresh(places.disk)
            save(tensors, path)
            os.unlink(path)

        return run

    return Line(
        f"publish {len(tensors):,} tensors of 64 bytes",
        {
            "mmrpc": ours,
            "limit": limit,
            **peer("tensordict", theirs),
            **peer("safetensors.torch", lambda m: {"safetensors": in_one(m.save_file)}),
            "torch.save": in_one(torch.save),
        },
        2.0,
        how_limit="torch.cat and a pickled table of names and shapes in one file",
    )


def _arena(places: Places, tensors: dict[str, torch.Tensor]) -> tuple[str, Table]:
    path = places.fresh(places.memory)
    raw.write_tensor(path, torch.cat(list(tensors.values())), reserve=False)
    table = [(tuple(t.shape), 16 * i) for i, t in enumerate(tensors.values())]
    torch_rpc.rpc_sync("worker1", keep, (path, table))
    return path, table


def _send_new(places: Places, tensors: dict[str, torch.Tensor]) -> Line:
    path, table = _arena(places, tensors)
    fresh: list[Any] = []

    def publish() -> None:
        fresh[:] = [save_tree(places.fresh(places.memory), tensors, arena=True)]

    def theirs(module: Any) -> dict[str, Any]:
        x = module.TensorDict(tensors).memmap(places.fresh(places.memory))
        # As a plain dict, each leaf is sent as the reference that it is.
        leaves = dict(x.items())
        return {"tensordict": lambda: torch_rpc.rpc_sync("worker1", count, (leaves,))}

    return Line(
        f"send {len(tensors):,} tensors in one call, not seen before",
        {
            "mmrpc": Alternative(
                lambda: rpc.rpc_sync("worker1", count_all, (fresh[0],)), before=publish
            ),
            "limit": lambda: torch_rpc.rpc_sync("worker1", make_all, (path, table)),
            **peer("tensordict", theirs),
        },
        1.5,
        how_limit="a table of shapes and offsets by torch's RPC, as_strided for each",
    )


def _send_again(places: Places, tensors: dict[str, torch.Tensor]) -> Line:
    path, _ = _arena(places, tensors)
    tree = save_tree(places.fresh(places.memory), tensors, arena=True)
    return Line(
        f"send {len(tensors):,} tensors in one call, the receiver has the table",
        {
            "mmrpc": lambda: rpc.rpc_sync("worker1", count, (tree,)),
            "limit": lambda: torch_rpc.rpc_sync("worker1", count_kept, (path,)),
        },
        1.5,
        calls=20,
        how_limit="a name by torch's RPC",
    )


def keep(path: str, table: Table) -> None:
    """Runs on the receiver: maps an arena, and keeps its table."""
    nbytes = os.path.getsize(path)
    _kept[path] = (raw.map_tensor(path, (nbytes // 4,), torch.float32), table)


def make_all(path: str, table: Table) -> int:
    """Runs on the receiver: makes a tensor for each row of the table."""
    flat, _ = _kept[path]
    return len([flat.as_strided(shape, (1,), offset) for shape, offset in table])


def count(tree: Any) -> int:
    """Runs on the receiver: looks at how many there are."""
    return len(tree)


def count_all(tree: Any) -> int:
    """Runs on the receiver: makes all tensors."""
    return len(tree.to_dict())


def count_kept(path: str) -> int:
    """Runs on the receiver: looks at what it kept."""
    return len(_kept[path][1])
