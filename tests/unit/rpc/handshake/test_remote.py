"""Handshakes about object stores: nonces and id files as objects, on a real S3 API."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from mmrpc.config import parse_config
from mmrpc.paths.mounts import MountTable
from mmrpc.rpc.handshake import nonce
from tests.distributed.s3server import BUCKET, serving
from tests.unit.rpc.handshake.meeting import meet


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with serving() as client:
        yield client


@pytest.fixture
def prefix() -> str:
    return secrets.token_hex(4)


def cluster(roots, access):
    return parse_config(
        {
            "nodes": {node: {"mounts": {"data": root}} for node, root in roots.items()},
            "mounts": {"data": {"access": access}},
            "rpc": {"visibility_timeout_s": 0.5},
        }
    )


def keys(s3, prefix):
    found = s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return [entry["Key"] for entry in found.get("Contents", [])]


def test_a_writable_bucket_is_proven_by_an_object(s3, prefix):
    """One node writes an object, another reads it, and it is gone afterwards."""
    root = f"s3://{BUCKET}/{prefix}"
    outcome = meet(cluster({"a": root, "b": root}, "write"), ["a", "b"])
    [proven] = outcome.verdict.proven
    assert (proven.proof, proven.inode_comparable) == ("nonce", False)
    assert outcome.report.get("data", "b").implementation.startswith("s3fs.core.S3FileSystem ")
    assert keys(s3, prefix) == []


def test_another_prefix_is_refused(s3, prefix):
    """Two prefixes of one bucket are not one mount."""
    roots = {"a": f"s3://{BUCKET}/{prefix}/x", "b": f"s3://{BUCKET}/{prefix}/y"}
    [problem] = meet(cluster(roots, "write"), ["a", "b"]).verdict.problems
    assert (problem.node, problem.path) == ("b", roots["b"])
    assert "not the directory that a has" in problem.reason
    assert keys(s3, prefix) == []


def test_a_read_bucket_is_known_by_content(s3, prefix):
    """Without anybody who writes, each reference carries the identity of its content."""
    root = f"s3://{BUCKET}/{prefix}"
    outcome = meet(cluster({"a": root, "b": root}, "read"), ["a", "b"])
    assert [proven.proof for proven in outcome.verdict.proven] == ["content"]
    assert outcome.report.get("data", "a").same_as_others is None
    assert "nodes.a.cache_dir is not set" in outcome.verdict.warnings[0]


def test_a_read_bucket_may_have_an_id(s3, prefix):
    """An id object is looked at before that."""
    root = f"s3://{BUCKET}/{prefix}"
    config = cluster({"a": root, "b": root}, "read")
    [mount] = MountTable.from_config(config, "a")
    text = nonce.write_id(mount, "a")
    assert nonce.write_id(mount, "a") == text
    assert [p.proof for p in meet(config, ["a", "b"]).verdict.proven] == ["id-file"]


def test_a_missing_bucket_is_named(s3):
    """A bucket that is not there is told with node, mount and URL."""
    root = "s3://no-such-bucket-here/x"
    [problem, _] = meet(cluster({"a": root, "b": root}, "read"), ["a", "b"]).verdict.problems
    assert (problem.mount, problem.path) == ("data", root)
