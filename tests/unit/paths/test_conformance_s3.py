"""S3 as a mount, by the API that moto serves on localhost."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrpc.conformance import MountConformance
from mmrpc.paths.mounts import Mount
from mmrpc.paths.probing import probe
from tests.distributed.s3server import BUCKET, SECRET, serving


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of a server of our own."""
    with serving() as client:
        yield client


def test_an_empty_prefix_is_a_mount_and_a_missing_bucket_is_none(s3: Any) -> None:
    """A prefix appears with its first object, so it cannot be missing; a bucket can."""
    good = probe(Mount("data", f"s3://{BUCKET}/nothing/yet", "write"))
    assert (good.error, good.readable, good.writable) == (None, True, True)
    assert good.implementation.startswith("s3fs.core.S3FileSystem ")
    assert "Contents" not in s3.list_objects_v2(Bucket=BUCKET, Prefix="nothing/")
    for root in ("s3://missing-bucket/x", "s3://missing-bucket"):
        assert probe(Mount("data", root)).error == "PathNotFoundError"


def test_no_secret_is_told(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither reports nor errors of a server that refuses the key hold it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    client = pytest.importorskip("s3fs").S3FileSystem
    client.clear_instance_cache()
    report = probe(Mount("data", f"s3://{BUCKET}/x"))
    client.clear_instance_cache()
    assert not report.is_good
    told = f"{report} {report.problem()} {report.problem()!r}"
    assert SECRET not in told
    assert "user-of-test" not in told


class TestS3(MountConformance):
    """Objects below a prefix of a bucket."""

    @pytest.fixture(autouse=True)
    def _server(self, s3: Any) -> None:
        self.client = s3
        self.prefix = secrets.token_hex(4)

    def make_mount(self, tmp_path: Path) -> Mount:
        return Mount("data", f"s3://{BUCKET}/{self.prefix}", "write")

    def put(self, relative: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=f"{self.prefix}/{relative}", Body=content)

    def delete(self, relative: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=f"{self.prefix}/{relative}")
