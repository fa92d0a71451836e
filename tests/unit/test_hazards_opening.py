"""Hazards of opening: never zeros for a missing file, never a file made, grown or confused."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor, TensorRef, errors
from mmrpc.core import files
from tests.peers import as_both_users
from tests.unit.core.tensors import until

M = MemoryMappedTensor
F32 = torch.float32


def ways_to_open(x: MemoryMappedTensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Everything that opens the file of a tensor: by name, by pickle, by reference, by JSON."""
    data, reference, text, path = pickle.dumps(x), x.ref(), x.ref().to_json(), x.filename
    return {
        "from_filename": lambda: M.from_filename(path, F32, (4,)),
        "class": lambda: M(path, dtype=F32, shape=(4,)),
        "pickle": lambda: pickle.loads(data),
        "reference": reference.open,
        "plain": reference.open_plain,
        "json": lambda: TensorRef.from_json(text).open(),
        "for reading": lambda: reference.open("r"),
    }


def entries(directory: str) -> dict[str, tuple[int, int]]:
    """Names in a directory, with size and time of the last change of content."""
    found = {}
    for name in os.listdir(directory):
        status = os.lstat(f"{directory}/{name}")
        found[name] = status.st_size, status.st_mtime_ns
    return found


def make(directory: str) -> MemoryMappedTensor:
    return M.from_tensor(torch.arange(4.0), filename=f"{directory}/x")


@as_both_users
def test_missing_file(directory: str) -> None:
    """A missing file is an error, not a file of zeros, whoever asks and however."""
    for dropped in (False, True):
        x = make(directory)
        ways = ways_to_open(x)
        os.unlink(x.filename)
        if dropped:
            del x
        for way, opens in ways.items():
            with pytest.raises(errors.PathNotFoundError) as caught:
                opens()
            assert isinstance(caught.value, FileNotFoundError), way
        assert entries(directory) == {}


@as_both_users
def test_missing_directory(directory: str) -> None:
    """The error says how much of the path there is."""
    with pytest.raises(errors.PathNotFoundError, match="is the file system mounted"):
        M.from_filename(f"{directory}/a/b/x", F32, (4,))
    assert entries(directory) == {}


@as_both_users
def test_short_file(directory: str) -> None:
    """A file that is too short is an error with both sizes; it is not grown."""
    x = make(directory)
    ways = ways_to_open(x)
    os.truncate(x.filename, 15)
    before = entries(directory)
    for opens in ways.values():
        with pytest.raises(errors.FileTooShortError, match=r"15 bytes.*needs 16") as caught:
            opens()
        assert (caught.value.needed_bytes, caught.value.actual_bytes) == (16, 15)
    assert entries(directory) == before


@as_both_users
def test_replaced_file(directory: str) -> None:
    """Another file of that name is not the one that a reference means."""
    for change in (replace_by_rename, delete_and_create, replace_by_ours):
        x = make(directory)
        ways = ways_to_open(x)
        change(x.filename)
        for way in ("pickle", "reference", "plain", "json", "for reading"):
            with pytest.raises(errors.StaleReferenceError):
                ways[way]()
        assert ways["from_filename"]().tolist() == [9.0] * 4
        assert x.tolist() == [0, 1, 2, 3]
        os.unlink(x.filename)


def write_nines(path: str) -> None:
    Path(path).write_bytes(bytes(torch.full((4,), 9.0).view(torch.uint8).tolist()))


def replace_by_rename(path: str) -> None:
    write_nines(path + ".new")
    os.replace(path + ".new", path)


def delete_and_create(path: str) -> None:
    os.unlink(path)
    write_nines(path)


def replace_by_ours(path: str) -> None:
    M.full(4, fill_value=9.0, filename=path, existsok=True)


@as_both_users
def test_reused_inode(directory: str) -> None:
    """A file that got the inode of a deleted one is another file, though nothing maps the old."""
    for _ in range(20):
        x = make(directory)
        ways, inode = ways_to_open(x), os.stat(x.filename).st_ino
        path = x.filename
        del x
        delete_and_create(path)
        for way in ("pickle", "reference", "json"):
            with pytest.raises(errors.StaleReferenceError):
                ways[way]()
        is_reused = os.stat(path).st_ino == inode
        os.unlink(path)
        if is_reused:
            return


@as_both_users
def test_names_of_other_things(directory: str) -> None:
    """A link, a directory, a FIFO or a device is refused at once, for reading and writing."""
    real = make(directory).filename
    os.symlink(real, f"{directory}/link")
    os.symlink(f"{directory}/none", f"{directory}/dangling")
    os.mkdir(f"{directory}/directory")
    os.mkfifo(f"{directory}/fifo")
    names = [f"{directory}/{name}" for name in ("link", "dangling", "directory", "fifo")]
    for name in (*names, "/dev/zero", "/dev/null"):
        for mode in (None, "r", "r+"):
            with pytest.raises((errors.NotRegularFileError, errors.PathNotWritableError)) as caught:
                M.from_filename(name, F32, (1,), mode=mode)
            assert caught.value.path == name
    for name in names:
        for existsok in (False, True):
            with pytest.raises(errors.NotRegularFileError):
                M.zeros(4, filename=name, existsok=existsok)
    assert not os.path.exists(f"{directory}/none")
    assert make_again(real).tolist() == [0, 1, 2, 3]


def make_again(path: str) -> torch.Tensor:
    return M.from_filename(path, F32, (4,))


@as_both_users
def test_larger_file(directory: str) -> None:
    """A larger file gives its first elements, or those behind an offset."""
    x = make(directory)
    assert M.from_filename(x.filename, F32, (2,)).tolist() == [0, 1]
    assert M.from_filename(x.filename, F32, (2,), offset=8).tolist() == [2, 3]
    assert M.from_filename(x.filename, F32, (2,), 1, "r").tolist() == 1
    with pytest.raises(ValueError, match="multiple of 4"):
        M.from_filename(x.filename, F32, (1,), offset=2)
    with pytest.raises(ValueError, match="not negative"):
        M.from_filename(x.filename, F32, (1,), offset=-4)
    with pytest.raises(errors.FileTooShortError):
        M.from_filename(x.filename, F32, (2,), offset=12)


@as_both_users
def test_no_dtype(directory: str) -> None:
    """A dtype is not guessed."""
    x = make(directory)
    with pytest.raises(TypeError, match=r"torch\.dtype, not None"):
        M.from_filename(x.filename, None, (4,))
    with pytest.raises(TypeError):
        M.from_filename(x.filename, F32, None)


@as_both_users
def test_cut_while_mapped(directory: str) -> None:
    """A file that is cut while it is mapped is found out by check(), before it is touched."""
    x = M.zeros(4096, filename=f"{directory}/x")
    x.check()
    os.truncate(x.filename, 8192)
    with pytest.raises(errors.FileTooShortError):
        x.check()
    x[:2048].check()
    with pytest.raises(errors.FileTooShortError):
        x.ref().open()


@as_both_users
def test_opening_a_slow_path_leaves_the_others_running(directory: str) -> None:
    """While the kernel takes its time to open a file, other threads go on."""
    # No file system here can be made to stall, so a lease does: open(2) waits until its holder
    # has given it up, as it does on a slow mount.
    path = make(directory).filename
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    flags = files._OPEN_FLAGS
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        files._OPEN_FLAGS = flags & ~os.O_NONBLOCK  # with which open(2) would not wait
        opened: list[float] = []
        thread = threading.Thread(target=lambda: opened.append(float(make_again(path).sum())))
        thread.start()
        until(lambda: fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_WRLCK)
        assert opened == []  # it waits in the kernel, and we run
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        thread.join(30)
        assert opened == [6.0]
    finally:
        files._OPEN_FLAGS = flags
        os.close(fd)
