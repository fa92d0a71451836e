"""Hazards of file systems: the same law where links, handles or unnamed files are missing."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors
from mmrpc.core import sweep
from tests.needs import needs
from tests.peers import Peer

M = MemoryMappedTensor
_CLONE_NEWNS = 0x20000

pytestmark = needs("namespaces")


def own_namespace() -> None:
    """Lets this process mount what nobody else sees, and what goes with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    mount("--make-rprivate", "/")


def mount(*args: str) -> None:
    done = subprocess.run(["mount", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def mount_overlay(directory: str) -> str:
    """An overlay: its files have other handles than those below."""
    own_namespace()
    mount("-t", "tmpfs", "tmpfs", directory)
    lower, upper, work, top = (f"{directory}/{name}" for name in ("lower", "upper", "work", "top"))
    for name in (lower, upper, work, top):
        os.mkdir(name)
    Path(f"{lower}/below").write_bytes(b"\0\0\x80?" * 3)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mount("-t", "overlay", "-o", options, "overlay", top)
    return top


def mount_ramfs(directory: str) -> str:
    """A file system that keeps little but names and bytes."""
    own_namespace()
    mount("-t", "ramfs", "ramfs", directory)
    return directory


def mount_read_only(directory: str) -> str:
    """A file system that was written once."""
    own_namespace()
    mount("-t", "tmpfs", "tmpfs", directory)
    M.ones(3, filename=f"{directory}/x")
    mount("-o", "remount,ro", directory)
    return directory


MOUNTS = {"overlay": mount_overlay, "ramfs": mount_ramfs}


@pytest.fixture
def mounted(request: pytest.FixtureRequest, shared_dir: str) -> Iterator[tuple[Peer, str]]:
    """A process that has the file system, and where."""
    with Peer(modules=[__name__]) as peer:
        yield peer, peer.call(request.param, shared_dir)


def live_there(directory: str) -> None:
    """All that a file can go through."""
    path = f"{directory}/x"
    x = M.from_tensor(torch.arange(4.0), filename=path, durable=True)
    assert os.listdir(directory).count("x") == 1
    assert [name for name in os.listdir(directory) if name.endswith(".part")] == []
    data = pickle.dumps(x)
    pickle.loads(data)[0] = 9
    assert M.from_filename(path, torch.float32, (4,)).tolist() == [9, 1, 2, 3]
    with pytest.raises(errors.PathExistsError):
        M.zeros(4, filename=path)
    new = M.zeros(4, filename=path, existsok=True)
    assert x.tolist() == [9, 1, 2, 3]
    with pytest.raises(errors.StaleReferenceError):
        pickle.loads(data)
    data = pickle.dumps(new)
    del new, x
    os.unlink(path)
    with pytest.raises(errors.PathNotFoundError):
        pickle.loads(data)
    Path(path).write_bytes(b"\0" * 16)
    with pytest.raises(errors.StaleReferenceError):
        pickle.loads(data)
    M.ones(4, filename=path, existsok=True).flush()


@pytest.mark.parametrize("mounted", MOUNTS.values(), ids=MOUNTS, indirect=True)
def test_life_of_a_file(mounted: tuple[Peer, str]) -> None:
    """Files are created, opened, replaced and found stale as anywhere."""
    peer, directory = mounted
    peer.call(live_there, directory)


def change_below(directory: str) -> list[float]:
    """Opens a file of the lower layer, and again after it was copied up by a write."""
    path = f"{directory}/below"
    before = M.from_filename(path, torch.float32, (3,), mode="r")
    assert before.tolist() == [1, 1, 1]
    shared = M.from_filename(path, torch.float32, (3,), mode="r+")
    shared.fill_(2)
    shared.flush()
    return M.from_filename(path, torch.float32, (3,)).tolist()


@pytest.mark.parametrize("mounted", [mount_overlay], indirect=True)
def test_file_that_is_copied_up(mounted: tuple[Peer, str]) -> None:
    """A write to a file of a container's image reaches whoever opens it afterwards."""
    peer, directory = mounted
    assert peer.call(change_below, directory) == [2, 2, 2]


def read_only(directory: str) -> float:
    path = f"{directory}/x"
    with pytest.raises(errors.PathNotWritableError, match="read-only"):
        M.from_filename(path, torch.float32, (3,), mode="r+")
    for name, existsok in ((f"{directory}/y", False), (path, True)):
        with pytest.raises(errors.PathNotWritableError, match="read-only"):
            M.zeros(3, filename=name, existsok=existsok)
    x = M.from_filename(path, torch.float32, (3,))
    x.check()
    return float(pickle.loads(pickle.dumps(x)).sum())


@pytest.mark.parametrize("mounted", [mount_read_only], indirect=True)
def test_read_only(mounted: tuple[Peer, str]) -> None:
    """What cannot be written is said to be; reading and sending works."""
    peer, directory = mounted
    assert peer.call(read_only, directory) == 3


def other_namespace(directory: str) -> None:
    own_namespace()
    mount("-t", "tmpfs", "tmpfs", directory)
    M.zeros(3, filename=f"{directory}/x")


def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def test_other_mount_namespace(shared_dir: str) -> None:
    """The same path in another mount namespace is not the same file, and is not opened."""
    x = M.ones(3, filename=f"{shared_dir}/x")
    with Peer(modules=[__name__]) as peer:
        peer.call(other_namespace, shared_dir)
        with pytest.raises(errors.NotSharedError, match="mount namespace"):
            peer.call(total, x)
        assert peer.call(total, M.ones(3)) == 3  # memory is found by process, not by path


def test_killed_maker_on_ramfs(shared_dir: str) -> None:
    """Where files cannot be nameless, what a killed maker left is swept by the next."""
    part = sweep.part_name(f"{shared_dir}/x").replace(f"-{os.getpid()}-", "-4194304-")
    Path(part).touch()
    with Peer(modules=[__name__]) as peer:
        peer.call(replace_one, shared_dir)
    assert os.listdir(shared_dir) == ["x"]


def replace_one(directory: str) -> None:
    M.ones(3, filename=f"{directory}/x", existsok=True)
