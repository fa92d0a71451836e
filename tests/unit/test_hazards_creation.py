"""Hazards of creation: complete or absent, never in place, never something left behind."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors
from tests.peers import as_both_users

M = MemoryMappedTensor
F32 = torch.float32


def reread(path: str, count: int = 4) -> list[float]:
    return M.from_filename(path, F32, (count,)).tolist()


@as_both_users
def test_replacing_keeps_old_maps(directory: str) -> None:
    """existsok=True gives the name to a new file: whoever maps the old one keeps its bytes."""
    path = f"{directory}/x"
    old = M.from_tensor(torch.arange(4.0), filename=path)
    os.link(path, path + ".linked")
    new = M.from_tensor(torch.full((2,), 9.0), filename=path, existsok=True)
    new[0] = 8
    assert old.tolist() == reread(path + ".linked") == [0, 1, 2, 3]
    assert reread(path, 2) == [8, 9]
    assert os.path.getsize(path) == 8
    with pytest.raises(errors.StaleReferenceError):
        old.check()


@as_both_users
def test_replaced_empty_shows_no_old_bytes(directory: str) -> None:
    """What is not set is zeros, not what the file of that name held before."""
    path = f"{directory}/x"
    M.full(4, fill_value=7.0, filename=path)
    assert M.empty(4, filename=path, existsok=True).tolist() == [0] * 4
    M.full(4, fill_value=7.0, filename=path, existsok=True)
    copied = M.from_tensor(torch.ones(4), filename=path, existsok=True, copy_data=False)
    assert copied.tolist() == [0] * 4


@as_both_users
def test_source_that_views_the_target(directory: str) -> None:
    """A plain view of a file can replace that file, in whatever order it is read."""
    path = f"{directory}/x"
    x = M.from_tensor(torch.arange(6.0).view(2, 3), filename=path)
    M.from_tensor(x.t(), filename=path, existsok=True)
    assert reread(path, 6) == [0, 3, 1, 4, 2, 5]
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=24)
    theirs = torch.empty(0).set_(storage, 0, (3, 2))
    M.from_tensor(theirs.t(), filename=path, existsok=True)
    assert reread(path, 6) == [0, 1, 2, 3, 4, 5]


@as_both_users
def test_permission_bits_are_kept(directory: str) -> None:
    """Replacing keeps the bits; a new file has what the umask leaves."""
    before = os.umask(0o026)
    try:
        M.zeros(2, filename=f"{directory}/x")
        assert stat.S_IMODE(os.stat(f"{directory}/x").st_mode) == 0o640
        os.chmod(f"{directory}/x", 0o600)
        M.zeros(2, filename=f"{directory}/x", existsok=True)
        assert stat.S_IMODE(os.stat(f"{directory}/x").st_mode) == 0o600
    finally:
        os.umask(before)


@as_both_users
def test_nothing_is_seen_before_it_is_whole(directory: str) -> None:
    """Whoever looks at the name while a file is written sees no file, or the whole of it."""
    path, count = f"{directory}/x", 1 << 22
    seen: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                seen.add("whole" if reread(path, count)[-1] == 5 else "part")
            except (errors.PathNotFoundError, errors.FileTooShortError) as error:
                seen.add(type(error).__name__)

    thread = threading.Thread(target=look)
    thread.start()
    M.full(count, fill_value=5.0, filename=path)
    while "whole" not in seen and thread.is_alive():
        done.wait(0.01)
    done.set()
    thread.join()
    assert seen <= {"PathNotFoundError", "whole"}, seen


@as_both_users
def test_failure_leaves_nothing(directory: str) -> None:
    """A creation that fails does not stand in the way of the next try."""
    path = f"{directory}/x"

    def pieces_that_fail() -> None:
        M.full(4, fill_value=2**40, dtype=torch.int8, filename=path)

    for fails in (
        pieces_that_fail,
        lambda: M.from_tensor(torch.ones(3), shape=(2, 2), filename=path),
        lambda: M.from_tensor(torch.ones(3, requires_grad=True), filename=path),
        lambda: M.zeros(2, dtype=torch.qint8, filename=path),
        lambda: M.zeros(1 << 61, filename=path),
    ):
        with pytest.raises(RuntimeError):
            fails()
        assert os.listdir(directory) == []
    assert M.ones(3, filename=path).sum() == 3


@as_both_users
def test_no_elements(directory: str) -> None:
    """A tensor without elements is a file of no bytes, or none; both can be opened."""
    for number, shape in enumerate([(0,), (2, 0), (0, 3, 2)]):
        path = f"{directory}/{number}"
        for x in (M.zeros(shape, filename=path), M.from_tensor(torch.empty(shape))):
            again = x.ref().open()
            assert again.shape == x.shape == shape
            assert again.sum() == 0
            x.flush()
            x.check()
        assert os.path.getsize(path) == 0
        assert M.from_filename(path, F32, shape).shape == shape


@as_both_users
def test_misspelt_keyword(directory: str) -> None:
    """A keyword that there is not is an error, not an anonymous tensor."""
    for make in (M.zeros, M.ones, M.empty):
        with pytest.raises(TypeError, match="file_name"):
            make(2, file_name=f"{directory}/x")
    with pytest.raises(TypeError, match="file_name"):
        M.full(2, fill_value=1, file_name=f"{directory}/x")
    with pytest.raises(TypeError, match="exists_ok"):
        M.from_tensor(torch.ones(2), filename=f"{directory}/x", exists_ok=True)


@as_both_users
def test_read_only_directory(directory: str) -> None:
    """Where one may not rename, replacing is refused; nothing is written in place."""
    place = f"{directory}/place"
    os.mkdir(place)
    x = M.ones(3, filename=f"{place}/x")
    os.chmod(place, 0o555)
    try:
        if os.geteuid() != 0:  # whom no permission stops
            for name, existsok in (("x", True), ("y", False)):
                with pytest.raises(errors.PathNotWritableError) as caught:
                    M.zeros(3, filename=f"{place}/{name}", existsok=existsok)
                assert isinstance(caught.value, PermissionError)
        assert x.tolist() == reread(f"{place}/x", 3) == [1, 1, 1]
    finally:
        os.chmod(place, 0o777)
    assert os.listdir(place) == ["x"]


@as_both_users
def test_file_belongs_to_the_caller(directory: str) -> None:
    """Nothing that is dropped deletes, cuts or grows a file."""
    path = f"{directory}/x"
    x = M.ones(3, filename=path)
    y = M.from_filename(path, F32, (2,), mode="r")
    del x, y
    assert Path(path).read_bytes() == b"\0\0\x80?" * 3
