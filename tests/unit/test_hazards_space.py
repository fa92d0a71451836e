"""Hazards of space: a full disk is an error at creation, not a SIGBUS at a later write."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors
from tests.needs import needs
from tests.peers import NOBODY, Peer, become

M = MemoryMappedTensor
MIB = 1 << 20
_CLONE_NEWNS = 0x20000

pytestmark = needs("namespaces")


def mount_small(directory: str, size: str) -> None:
    """Gives this process a tmpfs of its own, which goes with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True, timeout=60)
    options = f"size={size},mode=1777"
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], check=True, timeout=60
    )


@pytest.fixture(params=["root", "ordinary user"])
def small(request: pytest.FixtureRequest, shared_dir: str) -> Iterator[Peer]:
    """A process that has a file system of 4 MiB in the directory."""
    with Peer(modules=[__name__]) as peer:
        peer.call(mount_small, shared_dir, "4m")
        if request.param == "ordinary user":
            peer.call(become, NOBODY)
        yield peer


MAKERS: dict[str, Callable[[str], MemoryMappedTensor]] = {
    "zeros": lambda path: M.zeros(8 * MIB, dtype=torch.uint8, filename=path),
    "ones": lambda path: M.ones(8 * MIB, dtype=torch.uint8, filename=path),
    "empty": lambda path: M.empty(8 * MIB, dtype=torch.uint8, filename=path),
    "from_tensor": lambda path: M.from_tensor(torch.ones(2 * MIB), filename=path),
    "rearranged": lambda path: M.from_tensor(torch.ones(2, MIB).t(), filename=path),
    "without data": lambda path: M.from_tensor(torch.ones(2 * MIB), filename=path, copy_data=False),
}


def make_too_much(name: str, directory: str) -> tuple[int, int, list[str], float]:
    """What a failed creation says and leaves, and a smaller one afterwards."""
    with pytest.raises(errors.NoSpaceError) as caught:
        MAKERS[name](f"{directory}/x")
    assert isinstance(caught.value, OSError)
    left = os.listdir(directory)
    retry = M.ones(2 * MIB, dtype=torch.uint8, filename=f"{directory}/x")
    return caught.value.needed_bytes, caught.value.free_bytes, left, int(retry.sum())


@pytest.mark.parametrize("name", MAKERS)
def test_full_disk(name: str, small: Peer, shared_dir: str) -> None:
    """Too large a tensor cannot be made, leaves nothing, and does not block the retry."""
    assert small.call(make_too_much, name, shared_dir) == (8 * MIB, 4 * MIB, [], 2 * MIB)


def free_bytes(directory: str) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def write_all_over(directory: str) -> list[int]:
    """Fills the disk beside a tensor of zeros, and writes to all of it."""
    x = M.zeros(2 * MIB, dtype=torch.uint8, filename=f"{directory}/x")
    with open(f"{directory}/filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free_bytes(directory))
    assert free_bytes(directory) == 0
    x.fill_(3)
    x.flush()
    return x.unique().tolist()


def test_space_of_zeros_is_reserved(small: Peer, shared_dir: str) -> None:
    """What was created can be written to, though the disk is full by then."""
    assert small.call(write_all_over, shared_dir) == [3]


def replace_too_large(directory: str) -> list[object]:
    old = M.ones(3 * MIB, dtype=torch.uint8, filename=f"{directory}/x")
    with pytest.raises(errors.NoSpaceError):
        M.zeros(3 * MIB, dtype=torch.uint8, filename=f"{directory}/x", existsok=True)
    again = M.from_filename(f"{directory}/x", torch.uint8, (3 * MIB,))
    return [os.listdir(directory), int(old.sum()), int(again.sum())]


def test_replacement_that_does_not_fit(small: Peer, shared_dir: str) -> None:
    """A replacement for which there is no space leaves the old file as it was."""
    assert small.call(replace_too_large, shared_dir) == [["x"], 3 * MIB, 3 * MIB]


def make_sparse(directory: str) -> str:
    try:
        M.zeros(2 * free_bytes(directory), dtype=torch.uint8, filename=f"{directory}/x")
    except errors.NoSpaceError as error:
        assert os.listdir(directory) == []
        return str(error)
    raise AssertionError("more than there is was promised")


def test_no_promises_on_a_real_disk(user: Peer, shared_dir: str) -> None:
    """More than the disk has is refused at once, not promised as a sparse file."""
    assert "bytes are needed" in user.call(make_sparse, shared_dir)


def make_in_memory(nbytes: int) -> None:
    M.zeros(nbytes, dtype=torch.uint8)


def test_more_memory_than_there_is(user: Peer) -> None:
    """More anonymous memory than is available is refused at creation."""
    with open("/proc/meminfo") as meminfo:
        total_bytes = int(meminfo.readline().split()[1]) * 1024
    with pytest.raises(errors.NoSpaceError, match="are available"):
        user.call(make_in_memory, 2 * total_bytes)


def fill_file_size_limit(directory: str) -> list[str]:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    for make in MAKERS.values():
        with pytest.raises(errors.NoSpaceError):
            make(f"{directory}/x")
    return os.listdir(directory)


def test_file_size_limit(shared_dir: str) -> None:
    """A limit of the file's size (ulimit -f) is no space either."""
    with Peer() as peer:
        assert peer.call(fill_file_size_limit, shared_dir) == []
