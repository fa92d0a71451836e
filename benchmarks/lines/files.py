"""Making, opening and reading files."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
        yield _create(
            places, directory, big, f"create from a tensor, {big // MIB} MiB, {kind}", 1.1
        )
    yield _create(places, places.disk, MIB, "create from a tensor, 1 MiB, disk", 1.5, calls=20)
    yield _durable(places, big)
    for kind, directory in (("disk", places.disk), ("tmpfs", places.memory)):
        size = (256 if places.quick else 1024) * MIB
        yield _zeros(places, directory, size, f"zeros, {size // MIB} MiB, {kind}")
    yield _open_close(places)
    yield _reopen_read(places, big)


def _create(
    places: Places, directory: str, nbytes: int, name: str, asked: float, calls: int = 1
) -> Line:
    source = torch.arange(nbytes // 4, dtype=torch.int32)
    reserve = directory == places.disk

    def way(make):  # type: ignore[no-untyped-def]
        made: list[str] = []

        def run() -> None:
            path = places.fresh(directory)
            made.append(path)
            make(path)

        def after() -> None:
            while made:
                remove(made.pop())

        return Alternative(run, after=after)

    return Line(
        name,
        {
            "mmrpc": way(lambda p: MemoryMappedTensor.from_tensor(source, filename=p)),
            "limit": way(lambda p: raw.write_tensor(p, source, reserve=reserve)),
            **peer(
                "tensordict",
                lambda m: {
                    "tensordict": way(
                        lambda p: m.MemoryMappedTensor.from_tensor(source, filename=p)
                    )
                },
            ),
        },
        asked,
        calls=calls,
        how_limit="reserve on disk, write(2), map; no name is safe from others",
    )


def _durable(places: Places, nbytes: int) -> Line:
    source = torch.arange(nbytes // 4, dtype=torch.int32)

    def ours() -> None:
        path = places.fresh(places.disk)
        MemoryMappedTensor.from_tensor(source, filename=path, durable=True)
        remove(path)

    def limit() -> None:
        path = places.fresh(places.disk)
        raw.write_tensor(path, source, reserve=True)
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)
        remove(path)

    return Line(
        f"create and sync to the device, {nbytes // MIB} MiB, disk",
        {"mmrpc": ours, "limit": limit},
        how_limit="the same with fsync(2) of the file alone",
    )


def _zeros(places: Places, directory: str, nbytes: int, name: str) -> Line:
    count = nbytes // 4

    def way(make):  # type: ignore[no-untyped-def]
        paths: list[str] = []

        def run() -> None:
            paths.append(places.fresh(directory))
            make(paths[-1])

        def after() -> None:
            while paths:
                remove(paths.pop())

        return Alternative(run, after=after)

    def limit(path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.posix_fallocate(fd, 0, nbytes)
        os.close(fd)

    return Line(
        name,
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
    path = places.fresh(places.disk)
    MemoryMappedTensor.from_tensor(torch.arange(256, dtype=torch.int32), filename=path)
    shape = (256,)
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
        },
        1.8,
        calls=2000,
        how_limit="open(2), mmap(2), frombuffer",
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
        },
        1.05,
        how_limit="read through a mapping that was kept",
    )
