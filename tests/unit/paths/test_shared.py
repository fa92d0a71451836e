"""Files of the mounts by name, as users ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmrpc
from mmrpc import paths
from mmrpc.core.location import MountLocation
from mmrpc.core.resolver import set_resolver
from mmrpc.errors import (
    ConfigError,
    LayoutError,
    OutsideMountsError,
    PathNotFoundError,
    StaleReferenceError,
)
from mmrpc.paths.access import Policy
from mmrpc.paths.mounts import Mount, MountTable
from mmrpc.paths.proof import Proof
from mmrpc.paths.resolver import ClusterResolver
from mmrpc.paths.stage import Stage


@pytest.fixture(autouse=True)
def _node(root: Path, tmp_path: Path) -> Iterator[None]:
    """A node with a directory ``here`` and a store ``there``."""
    before = set_resolver(join(root, tmp_path / "cache"))
    yield
    set_resolver(before)


def join(root: Path, cache: Path, **policy: Any) -> ClusterResolver:
    mounts = [Mount("here", str(root), "write"), Mount("there", "memory://bucket/x", "write")]
    return ClusterResolver(
        MountTable(mounts, node="b"),
        proven={name: Proof(name, "content") for name in ("here", "there")},
        policy=Policy(**policy),
        stage=Stage(str(cache), node="b"),
    )


def test_a_name_means_the_same_on_every_node(root: Path, objects: Any) -> None:
    """mount://NAME/PATH is a path in a directory here, and a staged copy there."""
    objects.pipe_file("/bucket/x/a/y", b"content")
    assert paths.local_copy("mount://here/sub/file") == str(root / "sub" / "file")
    for url in ("mount://there/a/y", "memory://bucket/x/a/y"):
        assert Path(paths.local_copy(url)).read_bytes() == b"content"


def test_tensors_open_by_url(root: Path, objects: Any, tmp_path: Path) -> None:
    """`mmrpc.open` takes such names, and what it opens can be sent to other nodes."""
    from safetensors.torch import save_file

    save_file({"w": torch.arange(6.0)}, tmp_path / "m.safetensors")
    objects.put_file(str(tmp_path / "m.safetensors"), "/bucket/x/m.safetensors")
    tensor = mmrpc.open("mount://there/m.safetensors", "w")
    assert torch.equal(tensor, torch.arange(6.0))
    location = tensor.ref().location
    assert isinstance(location, MountLocation)
    assert (location.mount, location.path) == ("there", "m.safetensors")
    assert torch.equal(tensor.ref().open(), tensor)


def test_what_is_in_no_mount(root: Path) -> None:
    """Unknown mounts, other URLs and paths that lead out are typed errors."""
    with pytest.raises(ConfigError, match=r"no mount 'other' on this node \(known: here, there\)"):
        paths.local_copy("mount://other/x")
    for url in ("memory://bucket/other", "http://host/x?token=hidden", "mount://here/../secret"):
        with pytest.raises(OutsideMountsError) as caught:
            paths.local_copy(url)
        assert "hidden" not in str(caught.value)
    with pytest.raises(PathNotFoundError):
        paths.local_copy("mount://here/missing")


@pytest.mark.parametrize("mount", ["here", "there"])
def test_a_tree_is_published_and_loaded(mount: str, objects: Any) -> None:
    """What one node publishes, another gets whole, with local paths for all its files."""
    with paths.publish(mount, "v1") as directory:
        mmrpc.save_tree(directory, {"a": torch.ones(3)}, arena=True)
        with pytest.raises(PathNotFoundError, match="nothing complete"):
            paths.published(mount, "v1")
    assert set(paths.published(mount, "v1")) == {"tree.arena"}
    tensor = paths.load_tree(mount, "v1")["a"]
    assert torch.equal(tensor, torch.ones(3))
    location = tensor.ref().location
    assert isinstance(location, MountLocation)
    assert (location.mount, location.path) == (mount, "v1/tree.arena")


def test_a_tree_of_many_files_needs_a_directory(objects: Any) -> None:
    """It loads where the mount is a directory; from a store the error says what to do."""
    for mount in ("here", "there"):
        with paths.publish(mount, "v2") as directory:
            mmrpc.save_tree(directory, {"a": torch.ones(3)})
    assert torch.equal(paths.load_tree("here", "v2")["a"], torch.ones(3))
    with pytest.raises(LayoutError, match="arena=True"):
        paths.load_tree("there", "v2")


def test_what_was_changed_after_publishing_is_noticed(root: Path, objects: Any) -> None:
    """Another size is seen at once; other content, in the store or with verify: digest."""
    for mount in ("here", "there"):
        with paths.publish(mount, "v1") as directory:
            Path(directory, "x").write_bytes(b"content")
    objects.pipe_file("/bucket/x/v1/x", b"CONTENT")
    with pytest.raises(StaleReferenceError, match="content"):
        paths.published("there", "v1")
    (root / "v1" / "x").chmod(0o644)
    (root / "v1" / "x").write_bytes(b"CONTENT")
    assert set(paths.published("here", "v1")) == {"x"}
    set_resolver(join(root, root.parent / "cache", verify="digest"))
    with pytest.raises(StaleReferenceError, match="not the file that was published"):
        paths.published("here", "v1")
    (root / "v1" / "x").write_bytes(b"more content")
    with pytest.raises(StaleReferenceError, match="not the file that was published"):
        paths.published("here", "v1")


def test_without_a_cluster_there_are_no_mounts() -> None:
    """The error says how to get some."""
    set_resolver(None)
    for call in (
        lambda: paths.local_copy("mount://here/x"),
        lambda: paths.publish("here", "x"),
        lambda: paths.published("here", "x"),
    ):
        with pytest.raises(ConfigError, match="cluster= to init_rpc"):
            call()
