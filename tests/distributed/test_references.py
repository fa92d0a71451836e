"""A reference that cannot be opened is one typed error at the caller, whatever way it went."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors, rpc
from tests.distributed.workers import by_every_way, run

NOBODY = 65534
PR_SET_DUMPABLE = 4


@dataclass
class Parcel:
    """A tensor deep inside an ordinary object."""

    label: str
    content: dict[str, list[Any]]


def parcel(tensor: torch.Tensor) -> Parcel:
    return Parcel("p", {"tensors": [1, tensor, "x"]})


def remove(path: str) -> None:
    os.unlink(path)


def shorten(path: str) -> None:
    os.truncate(path, 16)


def replace(path: str) -> None:
    Path(path + ".new").write_bytes(b"\1" * 64)
    os.replace(path + ".new", path)


def forbid(path: str) -> None:
    os.chmod(path, 0)


def remove_directory(path: str) -> None:
    shutil.rmtree(os.path.dirname(path))


def link(path: str) -> None:
    os.rename(path, path + ".real")
    os.symlink(path + ".real", path)


def make_fifo(path: str) -> None:
    os.unlink(path)
    os.mkfifo(path)


def make_directory(path: str) -> None:
    os.unlink(path)
    os.mkdir(path)


BREAKS: dict[Callable[[str], None], type[errors.PathError]] = {
    remove: errors.PathNotFoundError,
    shorten: errors.FileTooShortError,
    replace: errors.StaleReferenceError,
    forbid: errors.PathNotReadableError,
    remove_directory: errors.PathNotFoundError,
    link: errors.NotRegularFileError,
    make_fifo: errors.NotRegularFileError,
    make_directory: errors.NotRegularFileError,
}


def snapshot(root: str) -> dict[str, Any]:
    found = {}
    for directory, _, files in os.walk(root):
        for name in ["", *files]:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            digest = None
            if os.path.isfile(path) and not os.path.islink(path) and os.access(path, os.R_OK):
                digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            found[path] = (status.st_mode, status.st_size, status.st_mtime_ns, digest)
    return found


_mine: dict[str, torch.Tensor] = {}


def file_of(root: str, name: str, rank: int) -> str:
    return f"{root}/{name}/{rank}/x.bin"


def map_files(root: str, rank: int) -> None:
    # Each worker maps only the files that it sends: what it receives it has to open.
    for name in ["whole", *(breaks.__name__ for breaks in BREAKS)]:
        path = file_of(root, name, rank)
        _mine[name] = MemoryMappedTensor.from_filename(path, torch.float32, (4, 4), mode="r")


def drop_privileges() -> None:
    if os.geteuid() == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # The change of user closed /proc/self to the process; a login as that user would not.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)


def take(received: Parcel) -> float:
    return float(received.content["tensors"][1].sum())


def give(name: str) -> Parcel:
    return parcel(_mine[name])


def send_broken_references(rank: int, root: str) -> dict[str, Any]:
    if rank == 1:
        return {}  # and serves until the other is done
    map_files(root, 0)
    rpc.rpc_sync("worker1", map_files, (root, 1))
    for breaks in BREAKS:
        for owner in (0, 1):
            breaks(file_of(root, breaks.__name__, owner))
    before = snapshot(root)
    rpc.rpc_sync("worker1", drop_privileges)
    drop_privileges()
    arguments, results, after = {}, {}, []
    for breaks in BREAKS:
        name = breaks.__name__
        arguments[name] = by_every_way(rpc, "worker1", take, parcel(_mine[name]))
        after.append(rpc.rpc_sync("worker1", take, (parcel(_mine["whole"]),)))
        results[name] = by_every_way(rpc, "worker1", give, name)
        after.append(take(rpc.rpc_sync("worker1", give, ("whole",))))
    return {"before": before, "arguments": arguments, "results": results, "after": after}


@pytest.fixture(scope="module")
def sent() -> Iterator[dict[str, Any]]:
    """What became of each broken reference, by each way, as argument and as result."""
    # Not pytest's directory: no other user can enter that.
    root = tempfile.mkdtemp(prefix="mmrpc-test-")
    os.chmod(root, 0o755)
    try:
        for name in ["whole", *(breaks.__name__ for breaks in BREAKS)]:
            for rank in (0, 1):
                path = Path(file_of(root, name, rank))
                path.parent.mkdir(parents=True)
                path.write_bytes(torch.ones(4, 4).numpy().tobytes())
                path.chmod(0o666)
        found = run(send_broken_references, 2, root)[0]
        yield {**found, "root": root, "now": snapshot(root)}
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("direction", ["arguments", "results"])
@pytest.mark.parametrize("breaks", BREAKS)
def test_a_broken_reference_is_one_typed_error_at_the_caller(
    sent: dict[str, Any], breaks: Callable[[str], None], direction: str, way: str
) -> None:
    """The error has the class, path and node of where the reference was opened."""
    error = sent[direction][breaks.__name__][way]
    owner, opener = (0, 1) if direction == "arguments" else (1, 0)
    assert error.cls is BREAKS[breaks]
    assert error.path == file_of(sent["root"], breaks.__name__, owner)
    assert error.node == f"worker{opener}"
    assert error.reason
    assert not error.reason.endswith(".")
    assert error.hint
    assert error.hint.endswith((".", "?"))


def test_broken_references_leave_the_disk_as_it_was(sent: dict[str, Any]) -> None:
    """Opening creates, grows and changes no file, and no directory."""
    assert sent["now"] == sent["before"]


def test_calls_after_a_broken_reference_work(sent: dict[str, Any]) -> None:
    """Both workers go on serving after each failure, in both directions."""
    assert sent["after"] == [16.0] * 2 * len(BREAKS)
