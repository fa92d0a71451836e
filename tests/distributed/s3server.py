"""An S3 server on localhost, which child processes find by the environment."""

from __future__ import annotations

import contextlib
import logging
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

BUCKET = "test-bucket"
SECRET = "hidden-key-of-test"


@contextlib.contextmanager
def serving() -> Iterator[Any]:
    """Starts a server with one bucket; gives a client of it."""
    boto3 = pytest.importorskip("boto3")
    s3fs = pytest.importorskip("s3fs")
    server_class = pytest.importorskip("moto.server").ThreadedMotoServer
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_class(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # All servers of one process have the same objects.
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset, timeout=60).close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "user-of-test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
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
