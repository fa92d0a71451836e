"""Versions: whole or absent, kept while they are read, and found again."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
import torch

from mmrpc import TensorRef
from mmrpc.errors import LayoutError, PathNotFoundError
from mmrpc.train import leases
from mmrpc.train.arena import Arena
from mmrpc.train.table import Spec
from mmrpc.train.versions import Version, Versions, announced, latest


@pytest.fixture
def arena() -> Arena:
    return Arena.create({"x": Spec(torch.float32, (4,))}, filename=None)


def publish(versions: Versions, arena: Arena, number: int) -> Version:
    arena.tensors["x"].fill_(number)
    return versions.publish(number, arena, {})


def test_the_newest_is_found(tmp_path, arena) -> None:
    """The pointer names the last version, which has the values of its moment."""
    versions = Versions(tmp_path / "v")
    assert latest(versions.directory) is None
    publish(versions, arena, 1)
    kept = publish(versions, arena, 2)
    arena.tensors["x"].fill_(-1)
    for found in (latest(versions.directory), versions.newest(), kept):
        assert found is not None
        assert found.number == 2
        assert found.tensors["x"].tolist() == [2] * 4


def test_a_missing_directory_is_a_typed_error(tmp_path) -> None:
    """A directory that is not there is not an empty one."""
    with pytest.raises(PathNotFoundError, match="no such directory"):
        latest(tmp_path / "none")


def test_only_the_newest_stay(tmp_path, arena) -> None:
    """So many as asked for are kept, and those that are in use."""
    versions = Versions(tmp_path, keep=2)
    for number in range(6):
        publish(versions, arena, number)
    assert versions.retire(in_use=[1]) == [0, 2, 3]
    assert versions.numbers() == [1, 4, 5]
    assert versions.retire() == [1]


def test_a_lease_holds_a_version(tmp_path, arena) -> None:
    """What a living reader has claimed stays until it moves on."""
    versions = Versions(tmp_path, keep=1)
    for number in range(3):
        publish(versions, arena, number)
    reader = leases.Reader(versions.lease_directory)
    reader.hold(0)
    assert list(versions.readers().values()) == [0]
    assert versions.retire() == [1]
    reader.hold(2)
    assert versions.retire() == [0]
    reader.release()
    assert versions.readers() == {}


def test_a_lease_that_comes_while_deleting_is_seen(tmp_path, arena, monkeypatch) -> None:
    """A reader that claimed and opened just before a version is set aside keeps its file."""
    versions = Versions(tmp_path, keep=1)
    publish(versions, arena, 0)
    publish(versions, arena, 1)
    reader = leases.Reader(versions.lease_directory)
    opened = []
    rename = os.rename

    def claim_first(source: str, target: str) -> None:
        if target.endswith(".retired"):
            reader.hold(0)
            opened.append(Version.open(versions.path(0)))
        rename(source, target)

    monkeypatch.setattr(os, "rename", claim_first)
    assert versions.retire() == []
    assert any(name.endswith(".retired") for name in os.listdir(tmp_path))
    monkeypatch.undo()
    reader.hold(1)
    assert versions.retire() == [0]


def test_leases_of_the_dead_are_removed(tmp_path, arena) -> None:
    """A reader of this host that ended, or of another host that has not been heard of, is gone."""
    versions = Versions(tmp_path, lease_ttl_s=60)
    directory = versions.lease_directory
    reader = leases.Reader(directory)
    reader.hold(3)
    (name,) = os.listdir(directory)
    lease = json.loads(Path(directory, name).read_text())

    def write(file: str, **changes) -> str:
        path = os.path.join(directory, file)
        leases.write_text(path, json.dumps(lease | changes), durable=False)
        return path

    write("dead.json", started=lease["started"] + 1)
    write("far.json", host="elsewhere")
    old = write("far-and-silent.json", host="elsewhere")
    os.utime(old, (time.time() - 61,) * 2)
    write("broken.json", nonsense=1)
    assert set(versions.readers()) == {name.removesuffix(".json"), "far"}
    assert not os.path.exists(old)


def test_a_version_left_by_a_killed_publish_is_found(tmp_path, arena) -> None:
    """Killed between the file and the pointer: followers have the old one, a restart the new."""
    versions = Versions(tmp_path)
    publish(versions, arena, 1)
    arena.write_copy(versions.path(2), {"version": "2"}, durable=True)
    assert latest(tmp_path).number == 1
    assert Versions(tmp_path).newest().number == 2
    versions.publish(2, arena, {})
    assert latest(tmp_path).number == 2


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1, "file": "../x"}', "[1]"])
def test_a_pointer_to_anything_else_is_refused(tmp_path, text: str) -> None:
    """A pointer is data: it cannot lead out of the directory."""
    (tmp_path / "CURRENT").write_text(text)
    with pytest.raises(LayoutError, match="does not name a version"):
        announced(str(tmp_path))


def test_a_file_of_something_else_is_no_version(tmp_path, arena) -> None:
    """An arena without a number is refused."""
    arena.write_copy(str(tmp_path / "x"), {}, durable=False)
    with pytest.raises(LayoutError, match="no version"):
        Version.open(tmp_path / "x")


def test_a_checkpoint_is_a_reference(tmp_path, arena) -> None:
    """A version comes back from one line of JSON."""
    version = publish(Versions(tmp_path), arena, 5)
    text = version.ref().to_json()
    again = Version.open(TensorRef.from_json(text))
    assert again.number == 5
    assert again.tensors["x"].tolist() == [5] * 4


def test_a_version_of_another_module_is_refused(tmp_path, arena) -> None:
    """Loading says which tensor does not fit, and changes nothing."""
    version = publish(Versions(tmp_path), arena, 1)
    module = torch.nn.Linear(2, 2)
    before = module.weight.clone()
    with pytest.raises(LayoutError, match="the module lacks 'x'"):
        version.load_into(module)
    assert torch.equal(module.weight, before)


def test_a_failed_publish_leaves_the_version_before(tmp_path, arena, monkeypatch) -> None:
    """Without space nothing is announced and nothing is left behind."""
    from mmrpc.core import files
    from mmrpc.errors import NoSpaceError

    versions = Versions(tmp_path)
    publish(versions, arena, 1)

    def full(*_: object) -> None:
        raise NoSpaceError("no space", path=tmp_path)

    with monkeypatch.context() as patched, contextlib.suppress(NoSpaceError):
        patched.setattr(files, "write", full)
        publish(versions, arena, 2)
    assert latest(tmp_path).number == 1
    assert versions.numbers() == [1]
