"""What it brings to tell the kernel how a file will be read, or to mount tmpfs another way."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.harness import Alternative, Line
from benchmarks.lines import raw
from benchmarks.lines.peers import peer
from benchmarks.lines.places import Places, remove
from mmrpc import MemoryMappedTensor

ROW_BYTES = 3 * 32 * 32


def cold(places: Places) -> Iterator[Line]:
    """Lines of reading files that are not in memory, with and without advice."""
    count = (64 if places.quick else 256) << 20
    rows = torch.randint(0, count // ROW_BYTES, (256,))
    yield _cold_rows(places, count // ROW_BYTES, rows)
    yield _cold_scan(places, count // ROW_BYTES)


def _cold_tensor(places: Places, rows: int) -> MemoryMappedTensor:
    path = places.fresh(places.disk)
    source = torch.randint(0, 255, (rows, ROW_BYTES), dtype=torch.uint8)
    # On the device, since only clean pages can be dropped.
    return MemoryMappedTensor.from_tensor(source, filename=path, durable=True)


def _evict(x: MemoryMappedTensor) -> None:
    x.advise("dontneed")
    _evict_file(x.filename)


def _evict_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _advised(x: MemoryMappedTensor, advice: str | None, read: Callable[[Any], Any]) -> Alternative:
    def run() -> None:
        if advice:
            x.advise(advice)
        read(x)

    return Alternative(run, before=lambda: _evict(x))


def _cold_rows(places: Places, rows: int, wanted: torch.Tensor) -> Line:
    def way(advice: str | None) -> Alternative:
        return _advised(_cold_tensor(places, rows), advice, lambda x: x[wanted])

    path = _cold_tensor(places, rows).filename
    offsets = [ROW_BYTES * row for row in wanted.tolist()]

    def limit() -> None:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in offsets:
            os.pread(fd, ROW_BYTES, offset)
        os.close(fd)

    def with_numpy(np: Any) -> dict[str, Any]:
        x, picked = _cold_tensor(places, rows), wanted.numpy()

        def run() -> None:
            # Mapped each time, since pages that are mapped cannot be dropped from outside.
            np.memmap(x.filename, np.uint8, "r", shape=tuple(x.shape))[picked]

        return {"np.memmap": Alternative(run, before=lambda: _evict(x))}

    return Line(
        f"256 random rows of 3 KiB, not in memory, of {rows * ROW_BYTES >> 20} MiB, disk",
        {
            "mmrpc": way("random"),
            "mmrpc, no advice": way(None),
            "limit": Alternative(limit, before=lambda: _evict_file(path)),
            **peer("numpy", with_numpy),
        },
        how_limit="pread(2) of each, without read-ahead",
        note='advise("random")',
    )


def _cold_scan(places: Places, rows: int) -> Line:
    def way(advice: str | None) -> Alternative:
        return _advised(_cold_tensor(places, rows), advice, torch.sum)

    path = _cold_tensor(places, rows).filename
    buffer = bytearray(4 << 20)
    view = torch.frombuffer(buffer, dtype=torch.uint8)

    def limit() -> None:
        with open(path, "rb", buffering=0) as file:
            while n := file.readinto(buffer):
                view[:n].sum()

    return Line(
        f"read {rows * ROW_BYTES >> 20} MiB in order, not in memory, disk",
        {
            "mmrpc": way("sequential"),
            "mmrpc, willneed": way("willneed"),
            "mmrpc, no advice": way(None),
            "limit": Alternative(limit, before=lambda: _evict_file(path)),
        },
        how_limit="read(2) in pieces of 4 MiB",
        note='advise("sequential")',
    )


def huge(places: Places) -> Iterator[Line]:
    """Lines on tmpfs with huge pages; none without the right to mount one."""
    directories = {"mmrpc": f"{places.memory}/huge", "mmrpc, ordinary tmpfs": places.memory}
    if not _mount_huge(directories["mmrpc"]):
        print("  left out: a tmpfs with huge pages can be mounted by root only", flush=True)
        return
    nbytes = (64 if places.quick else 256) << 20
    source = torch.ones(nbytes // 4)
    yield _create(places, directories, source)
    yield _first_read(places, directories, source)


def _mount_huge(directory: str) -> bool:
    """Mounts a tmpfs that only this thread's mount namespace sees, and that goes with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_rec_private = 0x00020000, 0x4000 | 0x40000
    os.makedirs(directory)
    return (
        libc.unshare(clone_newns) == 0
        and libc.mount(b"none", b"/", None, ms_rec_private, None) == 0
        and libc.mount(b"tmpfs", directory.encode(), b"tmpfs", 0, b"huge=within_size") == 0
    )


def _create(places: Places, directories: dict[str, str], source: torch.Tensor) -> Line:
    def way(directory: str, make: Callable[[str], Any]) -> Alternative:
        path = places.fresh(directory)
        return Alternative(lambda: make(path), after=lambda: remove(path))

    return Line(
        f"create from a tensor, {source.nbytes >> 20} MiB, tmpfs with huge=within_size",
        {
            **{
                name: way(directory, lambda p: MemoryMappedTensor.from_tensor(source, filename=p))
                for name, directory in directories.items()
            },
            "limit": way(
                directories["mmrpc"], lambda p: raw.write_tensor(p, source, reserve=False)
            ),
        },
        how_limit="write(2), map, there too",
    )


def _first_read(places: Places, directories: dict[str, str], source: torch.Tensor) -> Line:
    shape = tuple(source.shape)

    def way(directory: str, open_: Callable[[str], torch.Tensor]) -> Callable[[], Any]:
        path = places.fresh(directory)
        raw.write_tensor(path, source, reserve=False)
        return lambda: open_(path).sum()

    def ours(path: str) -> torch.Tensor:
        return MemoryMappedTensor.from_filename(path, torch.float32, shape, mode="r")

    return Line(
        f"map and read {source.nbytes >> 20} MiB, tmpfs with huge=within_size",
        {
            **{name: way(directory, ours) for name, directory in directories.items()},
            "limit": way(directories["mmrpc"], lambda p: raw.map_tensor(p, shape, torch.float32)),
        },
        how_limit="map and read, there too",
    )
