"""A URL is never taken for a relative path: not by what opens files, nor by what makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import mmrpc
from mmrpc import MemoryMappedTensor as M
from mmrpc.core import creation
from mmrpc.core.location import MountLocation
from mmrpc.core.resolver import set_resolver
from mmrpc.data import DatasetWriter, MappedDataset, RangeWriter, missing_rows, plan
from mmrpc.errors import ConfigError, OutsideMountsError, PathError, PathNotWritableError
from mmrpc.paths.mounts import Mount, MountTable
from mmrpc.paths.resolver import ClusterResolver
from mmrpc.train import ParameterServer, Publisher, follow, latest

ROWS: Final = {"x": (torch.float32, (2,))}


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def serve(place: Any) -> object:
    """Starts and ends a parameter server."""
    with ParameterServer(torch.nn.Linear(2, 1), _sgd, place) as server:
        return server.directory


MAKERS: Final[dict[str, Callable[[Any], object]]] = {
    "zeros": lambda place: M.zeros(2, filename=place),
    "full_like": lambda place: M.full_like(torch.ones(2), 3, filename=place),
    "from_tensor": lambda place: M.from_tensor(torch.ones(2), filename=place),
    "save_tree": lambda place: mmrpc.save_tree(place, {"w": torch.ones(2)}),
    "save_tree arena": lambda place: mmrpc.save_tree(place, {"w": torch.ones(2)}, arena=True),
    "from_tensors": lambda place: MappedDataset.from_tensors(place, {"x": torch.ones(3, 2)}),
    "DatasetWriter": lambda place: DatasetWriter(place, ROWS).close(),
    "plan": lambda place: plan(place, 3, ROWS),
    "Publisher": lambda place: Publisher(torch.nn.Linear(2, 1), place).close(),
    "ParameterServer": serve,
}
OPENERS: Final[dict[str, Callable[[Any], object]]] = {
    "from_filename": lambda place: M.from_filename(place, torch.float32, (2,)),
    "from_storage": lambda place: M.from_storage(torch.ones(2).untyped_storage(), filename=place),
    "open": mmrpc.open,
    "load_tree": mmrpc.load_tree,
    "MappedDataset": MappedDataset,
    "missing_rows": missing_rows,
    "RangeWriter": lambda place: RangeWriter(place, 0, 1),
    "latest": latest,
    "follow": lambda place: follow(place, torch.nn.Linear(2, 1)),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, and no mounts before and after."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    before = set_resolver(None)
    yield directory
    set_resolver(before)


def join(*mounts: Mount) -> None:
    """Makes this process a node that has the mounts."""
    set_resolver(ClusterResolver(MountTable(mounts, node="a"), proven={}))


@pytest.mark.parametrize("url", ["mount://params/x", "s3://b/x", "file:///x", "git+ssh://h/x"])
@pytest.mark.parametrize("name", [*MAKERS, *OPENERS])
def test_without_mounts_a_url_is_refused(name: str, url: str, here: Path) -> None:
    """Whatever takes a name refuses a URL in one sentence, and leaves nothing behind."""
    with pytest.raises(ConfigError, match=r"is a URL, and this process knows no mounts\. Pass"):
        (MAKERS | OPENERS)[name](url)
    assert list(here.iterdir()) == []


def test_no_password_is_shown() -> None:
    """The error for a URL has neither its user nor its query."""
    with pytest.raises(ConfigError, match="'s3://bucket/x' is a URL") as caught:
        M.zeros(1, filename="s3://me:hidden@bucket/x?token=hidden")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("name", ["a:/x", "no scheme://x", "1://x", "sub/http://x"])
def test_what_is_no_url_is_a_path(name: str, here: Path) -> None:
    """Names that only look a little like a URL still are relative paths."""
    assert creation.absolute_path(name).startswith(f"{here}/")


@pytest.mark.parametrize("name", MAKERS)
def test_in_a_mount_all_is_made(name: str, here: Path, tmp_path: Path) -> None:
    """In a writable directory of this node, a URL does what the path would do."""
    root = tmp_path / "mount"
    root.mkdir()
    join(Mount("params", str(root), "write"))
    MAKERS[name]("mount://params/x")
    assert [path.name for path in root.iterdir()] == ["x"]
    assert list(here.iterdir()) == []


def test_what_was_made_by_name_is_opened_and_sent_by_name(tmp_path: Path) -> None:
    """The tensor has its local path; a reference to it names the mount."""
    join(Mount("params", str(tmp_path), "write"))
    x = M.from_tensor(torch.arange(3.0), filename="mount://params/x")
    assert x.filename == str(tmp_path / "x")
    location = x.ref().location
    assert isinstance(location, MountLocation)
    assert (location.mount, location.path) == ("params", "x")
    assert M.from_tensor(x, filename="mount://params/x") is x
    assert M.from_filename("mount://params/x", torch.float32, (3,)).tolist() == [0, 1, 2]
    mmrpc.save_tree("mount://params/tree/", {"w": torch.ones(2)})
    assert mmrpc.load_tree("mount://params/tree")["w"].tolist() == [1, 1]
    MappedDataset.from_tensors("mount://params/ds/", {"y": torch.arange(3)})
    assert MappedDataset("mount://params/ds/")["y"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"root": "memory://bucket", "access": "write"}, "is remote here"),
        ({"access": "read"}, "can be read, no more"),
        ({"access": "write", "reader": "copy"}, "reads the mount by copy"),
    ],
)
@pytest.mark.parametrize("name", MAKERS)
def test_what_cannot_be_made_there(
    name: str, fields: dict[str, Any], reason: str, here: Path
) -> None:
    """Remote mounts, copies and mounts for reading are refused by name, with what to do."""
    join(Mount("params", **{"root": str(here), **fields}))
    with pytest.raises(PathNotWritableError, match=reason) as caught:
        MAKERS[name]("mount://params/x")
    assert (caught.value.mount, caught.value.node) == ("params", "a")
    assert caught.value.path == "mount://params/x"
    assert caught.value.hint
    assert list(here.iterdir()) == []


def test_a_mount_for_reading_is_read(tmp_path: Path) -> None:
    """Opening needs no more than the config promises."""
    mmrpc.save_tree(tmp_path / "tree", {"w": torch.ones(2)})
    join(Mount("data", str(tmp_path), "read"))
    assert mmrpc.load_tree("mount://data/tree", "r")["w"].tolist() == [1, 1]


def test_a_remote_directory_is_not_here() -> None:
    """What needs the files of a directory says so of a remote mount, and what to call instead."""
    join(Mount("data", "memory://bucket", "write"))
    with pytest.raises(PathError, match=r"is remote here, .*mmrpc\.open") as caught:
        mmrpc.load_tree("mount://data/tree")
    assert caught.value.path == "mount://data/tree"


@pytest.mark.parametrize("url", ["mount://params/../x", "mount://params//x", "s3://params/x"])
def test_nothing_is_made_outside(url: str, tmp_path: Path) -> None:
    """A URL that leads out of the mounts is refused."""
    root = tmp_path / "mount"
    root.mkdir()
    join(Mount("params", str(root), "write"))
    with pytest.raises(OutsideMountsError):
        M.zeros(2, filename=url)
    assert list(root.iterdir()) == []
