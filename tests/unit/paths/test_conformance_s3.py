"""S3 as a mount, by the API that moto serves on localhost."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrpc.conformance import MountConformance
from mmrpc.paths.mounts import Mount

BUCKET = "test-bucket"


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of an S3 server of our own, which child processes find by the environment."""
    boto3 = pytest.importorskip("boto3")
    s3fs = pytest.importorskip("s3fs")
    server_class = pytest.importorskip("moto.server").ThreadedMotoServer
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_class(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "user-of-test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-key-of-test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # fsspec keeps one client per process, and another test's had another server.
        s3fs.S3FileSystem.clear_instance_cache()
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        try:
            yield client
        finally:
            client.close()
            server.stop()
            s3fs.S3FileSystem.clear_instance_cache()


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
