"""References to objects: what a node with a remote mount sends, opens and refuses."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmrpc.config import parse_config
from mmrpc.core.location import Mode, MountLocation
from mmrpc.core.mapping import FileMapping
from mmrpc.errors import NotSharedError, PathNotWritableError, StaleReferenceError
from mmrpc.paths.mounts import Mount, MountTable
from mmrpc.paths.proof import Proof
from mmrpc.paths.resolver import ClusterResolver
from mmrpc.paths.stage import Stage

ELSEWHERE = "0123456789abcdef"
REMOTE = Mount("data", "memory://bucket")


def node(mount: Mount, cache: Path | None, **options: Any) -> ClusterResolver:
    return ClusterResolver(
        MountTable([mount], node="b"),
        proven={"data": Proof("data", "content")},
        stage=None if cache is None else Stage(str(cache), node="b"),
        **options,
    )


def content_of(mapping: Any) -> bytes:
    return ctypes.string_at(mapping.address, mapping.nbytes)


def open_now(resolver: ClusterResolver, path: str, nbytes: int) -> tuple[Any, MountLocation]:
    """Opens what is there now, as a node would that got the reference from itself."""
    assert resolver._stage is not None
    fd, local, _ = resolver._stage.open(REMOTE, path, digest=True)
    with open(fd, "rb") as file:
        assert len(file.read()) == nbytes
    from mmrpc.core.mapping import map_file

    mapping = map_file(local, Mode.READ)
    location = resolver.locate(mapping)
    assert isinstance(location, MountLocation)
    return mapping, location


def test_a_copy_is_sent_as_its_object(objects: Any, tmp_path: Path) -> None:
    """What travels for a staged file is mount, path and version; the other node stages it too."""
    objects.pipe_file("/bucket/a/x", b"content")
    mapping, location = open_now(node(REMOTE, tmp_path / "one"), "a/x", 7)
    assert (location.mount, location.path, location.size_bytes) == ("data", "a/x", 7)
    assert location.content.startswith("time:")
    other = node(REMOTE, tmp_path / "two").attach(location, Mode.READ, 7)
    assert content_of(other) == content_of(mapping) == b"content"
    assert isinstance(other, FileMapping)
    assert other.path.startswith(str(tmp_path / "two"))


def test_writes_to_an_object_cannot_be_shared(objects: Any, tmp_path: Path) -> None:
    """A writable mapping of a copy would lose what is written."""
    objects.pipe_file("/bucket/x", b"content")
    resolver = node(REMOTE, tmp_path / "cache")
    _, location = open_now(resolver, "x", 7)
    with pytest.raises(PathNotWritableError, match="remote here"):
        resolver.attach(location, Mode.WRITE, 7)


def test_a_node_without_a_place_for_copies(objects: Any, tmp_path: Path) -> None:
    """The error names the line of the config."""
    objects.pipe_file("/bucket/x", b"content")
    _, location = open_now(node(REMOTE, tmp_path / "cache"), "x", 7)
    with pytest.raises(NotSharedError, match=r"nodes\.b\.cache_dir"):
        node(REMOTE, None).attach(location, Mode.READ, 7)


def test_a_reference_must_say_which_version(objects: Any, tmp_path: Path) -> None:
    """Without a version it could be any content, unless the mount never changes."""
    objects.pipe_file("/bucket/x", b"content")
    resolver = node(REMOTE, tmp_path / "cache")
    _, location = open_now(resolver, "x", 7)
    unversioned = replace(location, content="", host=ELSEWHERE)
    with pytest.raises(StaleReferenceError, match="which version"):
        resolver.attach(unversioned, Mode.READ, 7)
    immutable = node(replace(REMOTE, immutable=True), tmp_path / "cache")
    assert content_of(immutable.attach(unversioned, Mode.READ, 7)) == b"content"
    with pytest.raises(StaleReferenceError, match="7 bytes, and 8 were meant"):
        immutable.attach(replace(unversioned, size_bytes=8), Mode.READ, 7)


class TestMixed:
    """A mount that is a directory on one node and an object store on the other."""

    @pytest.fixture
    def local(self, root: Path) -> Mount:
        return Mount("data", str(root), is_mixed=True)

    @pytest.fixture
    def remote(self, objects: Any) -> Mount:
        objects.pipe_file("/bucket/file", b"inside")
        return replace(REMOTE, is_mixed=True)

    def mapped(self, root: Path) -> FileMapping:
        from mmrpc.core.mapping import map_file

        return map_file(str(root / "file"), Mode.READ)

    def test_the_content_decides(
        self, local: Mount, remote: Mount, root: Path, tmp_path: Path
    ) -> None:
        """From the directory to the store and back, the digest is what is compared."""
        a, b = node(local, None), node(remote, tmp_path / "cache")
        there = a.locate(self.mapped(root))
        assert isinstance(there, MountLocation)
        assert there.content.startswith("sha256:")
        mapping = b.attach(replace(there, host=ELSEWHERE), Mode.READ, 6)
        assert content_of(mapping) == b"inside"
        back = b.locate(mapping)
        assert isinstance(back, MountLocation)
        assert back.content == there.content
        assert content_of(a.attach(back, Mode.READ, 6)) == b"inside"

    def test_other_content_is_stale_in_both_directions(
        self, local: Mount, remote: Mount, root: Path, tmp_path: Path, objects: Any
    ) -> None:
        """The same name and size with other bytes is another file."""
        a, b = node(local, None), node(remote, tmp_path / "cache")
        here = a.locate(self.mapped(root))
        assert isinstance(here, MountLocation)
        objects.pipe_file("/bucket/file", b"beside")
        with pytest.raises(StaleReferenceError, match="content"):
            b.attach(replace(here, host=ELSEWHERE), Mode.READ, 6)
        there = replace(here, host=ELSEWHERE, content="sha256:" + "0" * 64)
        with pytest.raises(StaleReferenceError, match="content"):
            a.attach(there, Mode.READ, 6)


def test_a_resolver_follows_from_the_config(tmp_path: Path, root: Path) -> None:
    """Remote mounts get a stage in the node's cache directory; other nodes have none."""
    cluster = parse_config(
        {
            "master": {"port": 29500},
            "nodes": {
                "a": {"mounts": {"data": str(root)}},
                "b": {"mounts": {"data": "s3://bucket"}, "cache_dir": str(tmp_path / "cache")},
            },
            "mounts": {"data": {}},
        }
    )
    a = ClusterResolver.from_config(cluster, "a", proven={})
    b = ClusterResolver.from_config(cluster, "b", proven={})
    assert (a.node, a._stage) == ("a", None)
    assert b.node == "b"
    assert b._stage is not None
    assert b._stage._objects == str(tmp_path / "cache" / "objects")
