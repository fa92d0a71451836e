"""Which mount a path belongs to, by its text and behind links."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrpc.config import parse_config
from mmrpc.paths.mounts import Mount, MountTable


def table(**roots: object) -> MountTable:
    return MountTable([Mount(name, str(root)) for name, root in roots.items()], node="a")


def found(table: MountTable, path: object) -> tuple[str, str] | None:
    place = table.find(str(path))
    return place and (place[0].name, place[1])


def test_the_longest_root_wins() -> None:
    """Nested mounts: a file belongs to the innermost."""
    mounts = table(outer="/mnt", inner="/mnt/data", other="/mnt/database")
    assert found(mounts, "/mnt/x") == ("outer", "x")
    assert found(mounts, "/mnt/data/x/y") == ("inner", "x/y")
    assert found(mounts, "/mnt/database/x") == ("other", "x")
    assert found(mounts, "/elsewhere") is None
    assert found(mounts, "/mnt") is None


def test_the_root_directory_can_be_a_mount() -> None:
    """A mount at / holds everything, with no slash too many."""
    mounts = table(all="/")
    assert found(mounts, "/etc/hosts") == ("all", "etc/hosts")
    mount = mounts.get("all")
    assert mount is not None
    assert mount.local_path("etc/hosts") == "/etc/hosts"


def test_remote_mounts_have_no_local_files() -> None:
    """A URL is never the prefix of a path."""
    assert found(table(data="s3://bucket"), "s3://bucket/x") is None


def test_a_path_that_could_not_be_sent_is_in_no_mount() -> None:
    """A name that receivers refuse is not offered to them."""
    assert found(table(data="/mnt"), "/mnt/a::b") is None


def test_links_are_seen_through(tmp_path: Path) -> None:
    """Links to the root, in the root and to files lead to one place."""
    (tmp_path / "real" / "v1").mkdir(parents=True)
    (tmp_path / "real" / "v1" / "x").touch()
    (tmp_path / "real" / "current").symlink_to("v1")
    (tmp_path / "alias").symlink_to("real")
    mounts = table(data=tmp_path / "alias")
    for path in ("alias/v1/x", "real/v1/x", "alias/current/x", "real/current/x"):
        place = mounts.find_real(str(tmp_path / path))
        assert place is not None
        assert place[1] == "v1/x"


def test_two_mounts_of_one_name_are_a_mistake() -> None:
    """Names are unique."""
    with pytest.raises(ValueError, match="two mounts are called 'x'"):
        MountTable([Mount("x", "/a"), Mount("x", "/b")])


def test_the_config_says_it_all() -> None:
    """Paths are the node's, the rest the cluster's; a mount of both kinds is mixed."""
    cluster = parse_config(
        {
            "nodes": {
                "a": {"mounts": {"data": "/mnt/data", "both": "/mnt/both"}, "host": "10.0.0.1"},
                "b": {"mounts": {"data": "/srv/data", "both": "s3://bucket"}, "host": "10.0.0.2"},
            },
            "master": {"node": "a", "port": 29500},
            "mounts": {
                "data": {"access": "write", "reader": "copy"},
                "both": {"trust": "declared", "immutable": True},
            },
        }
    )
    a, b = MountTable.from_config(cluster, "a"), MountTable.from_config(cluster, "b")
    assert a.get("data") == Mount("data", "/mnt/data", "write", "copy")
    assert b.get("both") == Mount(
        "both", "s3://bucket", trust="declared", immutable=True, is_mixed=True
    )
    assert (a.node, len(a), a.get("none")) == ("a", 2, None)
