"""Versions: whole or absent, kept while they are read, and found again."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch

from mmrpc import TensorRef
from mmrpc.core.trees import directory as treedir
from mmrpc.errors import (
    ConfigError,
    LayoutError,
    NoSpaceError,
    NotRegularFileError,
    PathError,
    PathExistsError,
    PathNotFoundError,
    StaleReferenceError,
)
from mmrpc.train import leases
from mmrpc.train.arena import Arena
from mmrpc.train.table import Spec
from mmrpc.train.version import Version, announced, latest
from mmrpc.train.versions import Versions


@pytest.fixture
def arena() -> Arena:
    return Arena.create({"x": Spec(torch.float32, (4,))}, filename=None)


def publish(versions: Versions, arena: Arena, number: int) -> Version:
    arena.tensors["x"].fill_(number)
    return versions.publish(number, arena)


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
    reader = leases.Reader(f"{versions.directory}/leases")
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
    reader = leases.Reader(f"{versions.directory}/leases")
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
    directory = f"{versions.directory}/leases"
    reader = leases.Reader(directory)
    reader.hold(3)
    (name,) = os.listdir(directory)
    lease = json.loads(Path(directory, name).read_text())

    def write(file: str, **changes) -> str:
        path = os.path.join(directory, file)
        treedir.write_small(path, json.dumps(lease | changes).encode())
        return path

    write("dead.json", started=lease["started"] + 1)
    write("far.json", host="elsewhere")
    for number, change in enumerate([{"nonsense": 1}, {"version": "3"}, {"pid": True}]):
        write(f"broken{number}.json", **change)
    assert set(versions.readers()) == {name.removesuffix(".json"), "far"}


def test_a_reader_on_another_host_is_heard_of_or_gone(tmp_path, monkeypatch) -> None:
    """What counts is how long the writer has heard nothing: clocks differ, and jump."""
    now = [1000.0]
    monkeypatch.setattr(leases.time, "monotonic", lambda: now[0])
    path = tmp_path / "far.json"
    path.write_text('{"version": 3, "host": "elsewhere", "pid": 1, "started": 1}')
    os.utime(path, (0, 0))
    seen = leases.Leases(str(tmp_path), ttl_s=60)
    for _ in range(3):
        now[0] += 50
        assert seen.held() == {"far": 3}
        os.utime(path, (now[0] * 1e6, now[0] * 1e6))
        assert seen.held() == {"far": 3}
    now[0] += 61
    assert seen.held() == {}
    assert not path.exists()


def test_a_forked_reader_leaves_its_parents_lease(tmp_path) -> None:
    """A child that closes or goes on does not take the claim from its parent."""
    reader = leases.Reader(str(tmp_path))
    reader.hold(1)
    pid = reader._pid
    reader._pid = pid + 1  # as a child sees it
    reader.release()
    assert len(os.listdir(tmp_path)) == 1
    reader.hold(2)
    assert sorted(leases.Leases(str(tmp_path), 60).held().values()) == [1, 2]


def test_a_version_left_by_a_killed_publish_is_found(tmp_path, arena) -> None:
    """Killed between the file and the pointer: followers have the old one, a restart the new."""
    versions = Versions(tmp_path)
    publish(versions, arena, 1)
    arena.write_copy(versions.path(2), {"version": "2"}, durable=True)
    assert latest(tmp_path).number == 1
    assert Versions(tmp_path).newest().number == 2
    versions.publish(2, arena)
    assert latest(tmp_path).number == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "[" * 2000,
        "\udc80",
        '{"version": 1, "file": "../x"}',
        '{"version": 2, "file": "v000000000001.safetensors"}',
        '{"version": true, "file": "v000000000001.safetensors"}',
        '{"version": 1, "file": "v000000000001.safetensors", "digest": 5}',
    ],
)
def test_a_pointer_to_anything_else_is_refused(tmp_path, text: str) -> None:
    """A pointer is data: it cannot lead out of the directory, nor lie about the number."""
    (tmp_path / "CURRENT").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(LayoutError, match="does not name a version"):
        announced(str(tmp_path))


def test_a_pointer_that_is_no_file_is_refused(tmp_path) -> None:
    """A pipe under its name is not waited for."""
    os.mkfifo(tmp_path / "CURRENT")
    with pytest.raises(NotRegularFileError, match="FIFO"):
        latest(tmp_path)


def test_a_broken_pointer_is_written_anew(tmp_path, arena) -> None:
    """The writer goes on where a pointer was damaged."""
    versions = Versions(tmp_path)
    publish(versions, arena, 1)
    (tmp_path / "CURRENT").write_text("damaged")
    publish(versions, arena, 2)
    assert latest(tmp_path).number == 2


def test_a_renamed_version_is_refused(tmp_path, arena) -> None:
    """A file that says it is another version than its name says is not taken."""
    versions = Versions(tmp_path)
    publish(versions, arena, 1)
    publish(versions, arena, 2)
    os.rename(versions.path(1), versions.path(2))
    with pytest.raises(LayoutError, match="is version 1: it was renamed"):
        latest(tmp_path)
    with pytest.raises(LayoutError, match="Move it away to go on from the version before"):
        versions.newest()


def test_a_version_of_other_values_is_not_taken_over(tmp_path, arena) -> None:
    """What was announced under a number stays that; the same values may come again."""
    versions = Versions(tmp_path)
    publish(versions, arena, 1)
    publish(versions, arena, 1)
    arena.tensors["x"].fill_(float("nan"))
    with pytest.raises(PathExistsError, match="published with other values"):
        versions.publish(1, arena)
    assert latest(tmp_path).tensors["x"].tolist() == [1] * 4


def test_a_version_that_was_never_announced_is_replaced(tmp_path, arena) -> None:
    """What a killed writer has left under the next number is of no use to anybody."""
    versions = Versions(tmp_path)
    publish(versions, arena, 1)
    arena.write_copy(versions.path(2), {"version": "2"}, durable=False)
    assert publish(versions, arena, 2).tensors["x"].tolist() == [2] * 4


@pytest.mark.parametrize("number", [-1, True, 1.0, None, "1", float("nan"), 10**12])
def test_numbers_that_no_file_can_have(tmp_path, arena, number) -> None:
    """A number that followers could not find is refused before anything is written."""
    with pytest.raises(ConfigError, match=r"^version: "):
        Versions(tmp_path).publish(number, arena)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "values", [{"keep": 0}, {"keep": True}, {"durable": "no"}, {"lease_ttl_s": float("nan")}]
)
def test_arguments_that_cannot_be(tmp_path, values) -> None:
    """They are refused by name, and nothing is made."""
    with pytest.raises(ConfigError, match=f"^{next(iter(values))}: it must be"):
        Versions(tmp_path / "v", **values)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "file/below", "file"])
def test_directories_that_cannot_be(tmp_path, name: str) -> None:
    """They are typed errors."""
    (tmp_path / "file").touch()
    with pytest.raises(PathError):
        Versions(tmp_path / name)


def test_a_digest_proves_the_bytes(tmp_path, arena) -> None:
    """A changed byte is found by whoever asks, and so is a file in the place of another."""
    versions = Versions(tmp_path, digest=True)
    version = publish(versions, arena, 1)
    assert version.digest.startswith("sha256:")
    latest(tmp_path, verify=True)
    Version.open(TensorRef.from_json(version.ref().to_json())).verify()
    data = bytearray(Path(version.filename).read_bytes())
    data[-1] ^= 1
    os.unlink(version.filename)
    Path(version.filename).write_bytes(data)
    latest(tmp_path)
    with pytest.raises(StaleReferenceError, match=r"its bytes have sha256:.*was published"):
        latest(tmp_path, verify=True)
    os.unlink(version.filename)
    arena.write_copy(version.filename, {"version": "1"}, durable=False)
    with pytest.raises(StaleReferenceError, match="it has None, and sha256:"):
        latest(tmp_path)


def test_without_a_digest_nothing_can_be_proven(tmp_path, arena) -> None:
    """Asking for a proof that is not there is an error, not a yes."""
    version = publish(Versions(tmp_path), arena, 1)
    with pytest.raises(LayoutError, match=r"has no digest. Make the publisher with digest=True"):
        version.verify()


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

    versions = Versions(tmp_path)
    publish(versions, arena, 1)

    def full(*_: object) -> None:
        raise NoSpaceError("no space", path=tmp_path)

    with monkeypatch.context() as patched, contextlib.suppress(NoSpaceError):
        patched.setattr(files, "write", full)
        publish(versions, arena, 2)
    assert latest(tmp_path).number == 1
    assert versions.numbers() == [1]


def test_without_space_for_the_pointer_nothing_is_left(tmp_path, arena, monkeypatch) -> None:
    """A version that cannot be announced takes no space from the next try."""

    def full(path: str, *_: object, **__: object) -> None:
        raise NoSpaceError("no space", path=path)

    versions = Versions(tmp_path)
    publish(versions, arena, 1)
    with monkeypatch.context() as patched:
        patched.setattr(treedir, "write_small", full)
        with pytest.raises(NoSpaceError, match="CURRENT"):
            publish(versions, arena, 2)
    assert versions.numbers() == [1]
    publish(versions, arena, 2)
    assert latest(tmp_path).tensors["x"].tolist() == [2] * 4
