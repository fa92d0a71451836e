"""Many tensors in one mapped file."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from mmrpc.errors import LayoutError, PathExistsError, PathNotFoundError
from mmrpc.train.arena import Arena
from mmrpc.train.table import Spec

SPECS = {
    "weight": Spec(torch.float32, (3, 4)),
    "empty": Spec(torch.float32, (0, 4)),
    "count": Spec(torch.int64, ()),
    "mask": Spec(torch.bool, (5,)),
}


def test_views_write_to_the_file(tmp_path) -> None:
    """What is written to a tensor is there for who opens the file."""
    arena = Arena.create(SPECS, filename=tmp_path / "a")
    arena.tensors["weight"].fill_(2.5)
    arena.tensors["count"].fill_(7)
    again = Arena.open(tmp_path / "a")
    assert {name: Spec.of(tensor) for name, tensor in again.tensors.items()} == SPECS
    assert again.tensors["weight"].sum() == 30
    assert again.tensors["count"] == 7


def test_pickles_as_a_reference(tmp_path) -> None:
    """A pickled arena is small whatever it holds, and opens onto the same memory."""
    specs = {"x": Spec(torch.float32, (1_000_000,))}
    for filename in (tmp_path / "a", None):
        arena = Arena.create(specs, filename=filename)
        data = pickle.dumps(arena)
        assert len(data) < 400
        pickle.loads(data).tensors["x"][5] = 1.0
        assert arena.tensors["x"][5] == 1


def test_a_copy_is_read_only_and_keeps_its_values(tmp_path) -> None:
    """A copy has the values of its moment and more metadata, and nobody may write to it."""
    arena = Arena.create(SPECS, filename=None)
    arena.tensors["weight"].fill_(1)
    path = str(tmp_path / "copy")
    arena.write_copy(path, {"version": "3"}, durable=True)
    arena.tensors["weight"].fill_(2)
    copy = Arena.open(path)
    assert copy.tensors["weight"].sum() == 12
    assert copy.table.metadata == {"version": "3"}
    assert not os.stat(path).st_mode & 0o222
    with pytest.raises(PathExistsError):
        arena.write_copy(path, {}, durable=False)
    assert Arena.open(path).tensors["weight"].sum() == 12


def test_opening_what_is_not_there_or_cut(tmp_path) -> None:
    """A missing file and one that was cut are typed errors, and nothing is made."""
    with pytest.raises(PathNotFoundError):
        Arena.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    Arena.create(SPECS, filename=None).write_copy(str(tmp_path / "a"), {}, durable=False)
    (tmp_path / "cut").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(LayoutError, match=r"cut'.*tells of"):
        Arena.open(tmp_path / "cut")
