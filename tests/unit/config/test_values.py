"""Kinds of values: what is taken, how it is written down, and what is refused with which words."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrpc.config import NodeConfig
from mmrpc.config.values import FrozenDict, check_absolute, check_mount_root


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("/mnt/data", "/mnt/data"),
        ("/mnt//data/", "/mnt/data"),
        ("/mnt/./data", "/mnt/data"),
        ("/", "/"),
        ("s3://bucket/data/", "s3://bucket/data"),
        ("s3://bucket", "s3://bucket"),
        ("https://host:8000/x//y", "https://host:8000/x/y"),
        ("sftp://user@host/srv", "sftp://user@host/srv"),
    ],
)
def test_one_spelling_is_kept(given, kept):
    """Two spellings of one place give one value, so that configs hash the same."""
    assert check_mount_root(given) == kept


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("data", "is relative"),
        ("./data", "is relative"),
        ("", "is relative"),
        ("~/data", "'~' means another thing"),
        ("/a/../b", r"'\.\.' is not allowed"),
        ("s3://b/../c", r"'\.\.' is not allowed"),
        ("/a::b", "chains file systems"),
        ("simplecache::s3://b/c", "chains file systems"),
        ("/a\0b", "NUL"),
        ("file:///data", "without a scheme"),
        ("memory://x", "no remote file system"),
        ("simplecache://x", "no remote file system"),
        ("s33://bucket", "no remote file system"),
        ("s3:bucket", "neither an absolute path nor"),
        ("s3:///x", "names no host or bucket"),
        ("sftp://user:secret@host/x", "no password"),
        ("https://host/x?token=1", "no password, query or token"),
        ("S3://bucket", "form scheme://"),
    ],
)
def test_misleading_roots_are_refused(given, words):
    """A root that could mean several things, or carries a credential, is refused and says why."""
    with pytest.raises(ValueError, match=words) as caught:
        check_mount_root(given)
    assert "secret" not in str(caught.value)


@given(st.lists(st.sampled_from(["a", "b", ".", "", "..", "x y", "é"]), max_size=6))
def test_absolute_paths_are_normal_or_refused(parts):
    """Whatever is taken is absolute, without ``.``, ``..`` and ``//``, and stays as it is."""
    path = "/" + "/".join(parts)
    if ".." in parts:
        with pytest.raises(ValueError, match="not allowed"):
            check_absolute(path)
        return
    kept = check_absolute(path)
    assert kept.startswith("/")
    assert "//" not in kept
    assert "." not in kept.split("/")
    assert check_absolute(kept) == kept


@pytest.mark.parametrize("host", ["a b", "user@host", "host:22", "-oProxyCommand=x", "", "a/b"])
def test_hosts_that_programs_would_misread_are_refused(host):
    """A host that ``ssh`` would take for an option, a user or a port is refused."""
    with pytest.raises(ValueError, match=r"host"):
        NodeConfig(host=host)


@pytest.mark.parametrize("host", ["10.0.0.1", "node-1.example.org", "fe80::1", "localhost"])
def test_names_and_addresses_are_hosts(host):
    """Names and both kinds of addresses are taken as they are."""
    assert NodeConfig(host=host).host == host


def test_a_program_is_absolute_or_a_bare_command():
    """``python`` may be found on the node's PATH, but not relative to somewhere."""
    assert NodeConfig(python="python3.12").python == "python3.12"
    assert NodeConfig(python="/opt/v/bin/python").python == "/opt/v/bin/python"
    with pytest.raises(ValueError, match="is relative"):
        NodeConfig(python="venv/bin/python")


def test_sizes_have_units():
    """Sizes are bytes, or text with a unit."""
    assert NodeConfig(cache_bytes="2GiB").cache_bytes == 2 << 30
    assert NodeConfig(cache_bytes=4096).cache_bytes == 4096


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.__setitem__("a", 2),
        lambda d: d.__delitem__("a"),
        lambda d: d.update(b=1),
        lambda d: d.pop("a"),
        lambda d: d.clear(),
        lambda d: d.setdefault("b", 1),
        lambda d: d.__ior__({"b": 1}),
    ],
)
def test_tables_cannot_be_changed(change):
    """Every way to change a table raises, and leaves it as it was."""
    table = FrozenDict(a=1)
    with pytest.raises(TypeError, match="cannot be changed"):
        change(table)
    assert table == {"a": 1}


def test_tables_can_be_copied_and_pickled():
    """A table survives pickling and copying with its type."""
    table = FrozenDict(a=FrozenDict(b=1))
    for other in (pickle.loads(pickle.dumps(table)), copy.copy(table), copy.deepcopy(table)):
        assert other == table
        assert type(other) is FrozenDict
