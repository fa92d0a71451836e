"""Making, opening and reading files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.harness import Alternative, Line
from benchmarks.lines import raw
from benchmarks.lines.peers import peer
from benchmarks.lines.places import Places, remove
from mmrpc import MemoryMappedTensor

MIB = 1 << 20


def lines(places: Places) -> Iterator[Line]:
    """Lines of making and opening files."""
    big = (64 if places.quick else 256) * MIB
    for kind, directory in (("disk", places.disk), ("tmpfs", places.memory)):
        yield _create(places, directory, big, kind, 1.1)
    yield _create(places, places.disk, MIB, "disk", 1.5, calls=20)
    yield _durable(places, big)
    size = (256 if places.quick else 1024) * MIB
    for kind, directory in (("disk", places.disk), ("tmpfs", places.memory)):
        yield _zeros(places, directory, size, kind)
    yield _open_close(places)
    yield _reopen_read(places, big)


def _making(places: Places, directory: str, make: Callable[[str], Any]) -> Alternative:
    """A way to make a file, under a name of its own; files go away between the samples."""
    made: list[str] = []

    def run() -> None:
        made.append(places.fresh(directory))
        make(made[-1])

    def after() -> None:
        while made:
            remove(made.pop())

    return Alternative(run, after=after)


def _create(
    places: Places, directory: str, nbytes: int, kind: str, asked: float, calls: int = 1
) -> Line:
    source = torch.arange(nbytes // 4, dtype=torch.int32)

    def way(make: Callable[[str], Any]) -> Alternative:
        return _making(places, directory, make)

    def with_numpy(np: Any) -> dict[str, Any]:
        array = source.numpy()

        def make(path: str) -> None:
            np.memmap(path, array.dtype, "w+", shape=array.shape)[:] = array

        return {"np.memmap": way(make)}

    return Line(
        f"create from a tensor, {nbytes // MIB} MiB, {kind}",
        {
            "mmrpc": way(lambda p: MemoryMappedTensor.from_tensor(source, filename=p)),
            "limit": way(lambda p: raw.write_tensor(p, source, reserve=directory == places.disk)),
            **peer(
                "tensordict",
                lambda m: {
                    "tensordict": way(
                        lambda p: m.MemoryMappedTensor.from_tensor(source, filename=p)
                    )
                },
            ),
            **peer("numpy", with_numpy),
            **peer(
                "safetensors.torch",
                lambda m: {"safetensors": way(lambda p: m.save_file({"x": source}, p))},
            ),
        },
        asked,
        calls=calls,
        how_limit="reserve (on disk), write(2), map",
        summary="make a file from a tensor" if nbytes > MIB and kind == "disk" else "",
    )


def _durable(places: Places, nbytes: int) -> Line:
    source = torch.arange(nbytes // 4, dtype=torch.int32)

    def limit(path: str) -> None:
        raw.write_tensor(path, source, reserve=True)
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)

    return Line(
        f"create and sync to the device, {nbytes // MIB} MiB, disk",
        {
            "mmrpc": _making(
                places,
                places.disk,
                lambda p: MemoryMappedTensor.from_tensor(source, filename=p, durable=True),
            ),
            "limit": _making(places, places.disk, limit),
        },
        how_limit="the same with fsync(2) of the file alone",
    )


def _zeros(places: Places, directory: str, nbytes: int, kind: str) -> Line:
    count = nbytes // 4

    def limit(path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.posix_fallocate(fd, 0, nbytes)
        os.close(fd)

    def way(make: Callable[[str], Any]) -> Alternative:
        return _making(places, directory, make)

    return Line(
        f"zeros, {nbytes // MIB} MiB, {kind}",
        {
            "mmrpc": way(lambda p: MemoryMappedTensor.zeros(count, filename=p)),
            "limit": way(limit),
            **peer(
                "tensordict",
                lambda m: {
                    "tensordict": way(lambda p: m.MemoryMappedTensor.zeros(count, filename=p))
                },
            ),
        },
        1.1,
        how_limit="posix_fallocate(3): a fresh file is zeros",
    )


def _open_close(places: Places) -> Line:
    path, packed = places.fresh(places.disk), places.fresh(places.disk)
    source = torch.arange(256, dtype=torch.int32)
    MemoryMappedTensor.from_tensor(source, filename=path)
    shape = (256,)

    def with_safetensors(module: Any) -> dict[str, Any]:
        module.torch.save_file({"x": source}, packed)

        def run() -> None:
            with module.safe_open(packed, "pt") as file:
                file.get_tensor("x")

        return {"safetensors": run}

    return Line(
        "open and close, 1 KiB",
        {
            "mmrpc": lambda: MemoryMappedTensor.from_filename(path, torch.int32, shape),
            "limit": lambda: raw.map_tensor(path, shape, torch.int32),
            **peer(
                "tensordict",
                lambda m: {
                    "tensordict": lambda: m.MemoryMappedTensor.from_filename(
                        path, torch.int32, shape
                    )
                },
            ),
            **peer(
                "numpy",
                lambda np: {"np.memmap": lambda: torch.from_numpy(np.memmap(path, np.int32, "r+"))},
            ),
            **peer("safetensors", with_safetensors),
        },
        1.8,
        calls=2000,
        how_limit="open(2), mmap(2), frombuffer",
        summary="open and close a small file",
    )


def _reopen_read(places: Places, nbytes: int) -> Line:
    path = places.fresh(places.memory)
    count = nbytes // 4
    kept = MemoryMappedTensor.from_tensor(torch.ones(count), filename=path)
    limit = raw.map_tensor(path, (count,), torch.float32)
    limit.sum()

    def read() -> None:
        assert kept.numel() == count  # keeps the mapping that is reused
        MemoryMappedTensor.from_filename(path, torch.float32, (count,)).sum()

    return Line(
        f"open a mapped file again and read it, {nbytes // MIB} MiB, tmpfs",
        {
            "mmrpc": read,
            "limit": limit.sum,
            **peer(
                "tensordict",
                lambda m: {
                    "tensordict": lambda: m.MemoryMappedTensor.from_filename(
                        path, torch.float32, (count,)
                    ).sum()
                },
            ),
            **peer(
                "numpy",
                lambda np: {
                    "np.memmap": lambda: torch.from_numpy(np.memmap(path, np.float32, "r+")).sum()
                },
            ),
        },
        1.05,
        calls=2,
        how_limit="read through a mapping that was kept",
    )
