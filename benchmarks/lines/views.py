"""Indexing, splitting and pickling."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.harness import Line
from benchmarks.lines import raw
from benchmarks.lines.peers import peer
from benchmarks.lines.places import Places
from mmrpc import MemoryMappedTensor


def lines(places: Places) -> Iterator[Line]:
    """Lines of what is done with a mapped tensor all the time."""
    plain = torch.randn(1000, 128)
    yield _same("x[i]", places, plain, lambda x: x[5], 2.5, 5000)
    yield _same("x[a:b]", places, plain, lambda x: x[5:50], 2.5, 5000)
    yield _same("unbind(0), 1,000 rows", places, plain, lambda x: x.unbind(0), 4, 50)
    yield _same("split(10), 100 parts", places, plain, lambda x: x.split(10), 3, 200)
    images = torch.randint(0, 255, (10_000, 3, 32, 32), dtype=torch.uint8)
    yield _gather("x[idx], 256 rows of 3x32x32 uint8", places, images)
    yield _gather("x[idx], 256 rows of 128 float32", places, torch.randn(100_000, 128))
    yield _pickle(places, plain)


def _peers(places: Places, plain: torch.Tensor, do: Callable[[Any], Any]) -> dict[str, Any]:
    def make(module: Any) -> dict[str, Any]:
        path = places.fresh(places.disk)
        x = module.MemoryMappedTensor.from_tensor(plain, filename=path)
        return {"tensordict": lambda: do(x)}

    return peer("tensordict", make)


def _same(
    name: str,
    places: Places,
    plain: torch.Tensor,
    do: Callable[[Any], Any],
    asked: float,
    calls: int,
) -> Line:
    ours = MemoryMappedTensor.from_tensor(plain, filename=places.fresh(places.disk))
    return Line(
        name,
        {
            "mmrpc": lambda: do(ours),
            "limit": lambda: do(plain),
            **_peers(places, plain, do),
        },
        asked,
        calls=calls,
        how_limit="a plain tensor; a subclass cannot reach it",
    )


def _gather(name: str, places: Places, plain: torch.Tensor) -> Line:
    ours = MemoryMappedTensor.from_tensor(plain, filename=places.fresh(places.memory))
    limit = raw.map_tensor(ours.filename, tuple(plain.shape), plain.dtype)
    rows = torch.randint(0, plain.shape[0], (256,))
    return Line(
        name,
        {
            "mmrpc": lambda: ours[rows],
            "limit": lambda: limit.index_select(0, rows),
            **_peers(places, plain, lambda x: x[rows]),
        },
        1.2,
        calls=500,
        how_limit="index_select on the mapping",
    )


def _pickle(places: Places, plain: torch.Tensor) -> Line:
    ours = MemoryMappedTensor.from_tensor(plain, filename=places.fresh(places.disk))
    view = ours[1:][2:]
    bare = raw.map_tensor(ours.filename, tuple(plain.shape), plain.dtype)
    piece = bare[1:][2:]
    _kept[:] = [bare]

    def limit() -> None:
        form = (ours.filename, piece.storage_offset(), tuple(piece.shape), piece.stride())
        pickle.loads(pickle.dumps((_rebuild, form)))
        _rebuild(*form)

    return Line(
        "pickle round trip of a view of a view",
        {
            "mmrpc": lambda: pickle.loads(pickle.dumps(view)),
            "limit": limit,
            **_peers(places, plain, lambda x: pickle.loads(pickle.dumps(x[1:][2:]))),
        },
        1.5,
        calls=1000,
        how_limit="a tuple pickled, as_strided on a mapping that was kept; nothing is checked",
        note=f"{len(pickle.dumps(view))} bytes",
    )


_kept: list[torch.Tensor] = []


def _rebuild(
    path: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    return _kept[0].as_strided(shape, strides, offset)
