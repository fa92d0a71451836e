"""Hosts without a common directory, and with a common bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmrpc
from mmrpc import MemoryMappedTensor, paths, rpc
from mmrpc.errors import MmrpcError
from tests.distributed import hosting, s3server
from tests.distributed.hosting import Host, describe, run, value
from tests.needs import needs

pytestmark = [needs("namespaces"), pytest.mark.timeout(180)]
HERE = "tests.distributed.test_hosts_s3"


@pytest.fixture
def s3() -> Iterator[Any]:
    with s3server.serving() as client:
        yield client


@pytest.fixture
def area() -> Iterator[Path]:
    with hosting.area() as path:
        yield path


def hosts(area: Path) -> dict[str, Host]:
    """Two hosts that have the bucket, and a cache of their own."""
    return {
        name: Host(
            {"data": f"s3://{s3server.BUCKET}/prefix"},
            settings={"cache_dir": str(area / f"cache-{name}")},
        )
        for name in "ab"
    }


def put(client: Any, tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    from safetensors.torch import save_file

    save_file({"w": tensor}, tmp_path / name)
    client.upload_file(str(tmp_path / name), s3server.BUCKET, f"prefix/{name}")


def total(tensor: MemoryMappedTensor) -> tuple[float, str]:
    return tensor.sum().item(), tensor.filename


def job_send() -> Any:
    tensor = mmrpc.open("mount://data/m.safetensors", "w")
    size = len(tensor.ref().to_json())
    return [rpc.rpc_sync("b", total, (tensor[2:],)) for _ in range(3)], size, tensor.ref().to_json()


def job_replaced(path: str) -> Any:
    """Sends what was opened before the object was replaced."""
    from fsspec.core import url_to_fs

    tensor = mmrpc.open("mount://data/m.safetensors", "w")
    fs, base = url_to_fs(f"s3://{s3server.BUCKET}/prefix")
    fs.put_file(path, f"{base}/m.safetensors")
    try:
        return rpc.rpc_sync("b", total, (tensor,))
    except MmrpcError as error:
        return describe(error)


def job_publish() -> Any:
    with paths.publish("data", "v1") as directory:
        Path(directory, "x").write_bytes(torch.arange(4.0).numpy().tobytes())
    return rpc.rpc_sync("b", read_published)


def read_published() -> Any:
    path = paths.published("data", "v1")["x"]
    return mmrpc.open(path, dtype=torch.float32, shape=(4,)).tolist()


def test_a_tensor_in_the_bucket_is_sent_by_reference(area: Path, tmp_path: Path, s3: Any) -> None:
    """The receiver stages the object once, from the bucket, into its own cache."""
    put(s3, tmp_path, "m.safetensors", torch.arange(1_000_000.0))
    answers, size, reference = value(
        run(area, hosts(area), f"{HERE}:job_send", mounts={"data": {"access": "read"}})
    )
    expected = torch.arange(1_000_000.0)[2:].sum().item()
    assert [answer[0] for answer in answers] == [expected] * 3
    assert len({answer[1] for answer in answers}) == 1
    assert answers[0][1].startswith(str(area / "cache-b"))
    assert size < 1000
    assert s3server.SECRET not in reference
    assert "127.0.0.1" not in reference
    files = [name for name in os.listdir(area / "cache-b" / "objects") if "json" not in name]
    assert len(files) == 1


def test_a_replaced_object_is_stale_elsewhere(area: Path, tmp_path: Path, s3: Any) -> None:
    """If the bucket has another version than the sender, the receiver gets an error."""
    put(s3, tmp_path, "m.safetensors", torch.zeros(8))
    (tmp_path / "new").mkdir()
    from safetensors.torch import save_file

    save_file({"w": torch.ones(8)}, tmp_path / "new" / "m.safetensors")
    error = value(
        run(
            area,
            hosts(area),
            f"{HERE}:job_replaced",
            str(tmp_path / "new" / "m.safetensors"),
            mounts={"data": {"access": "read"}},
        )
    )
    assert (error["type"], error["node"], error["mount"]) == ("StaleReferenceError", "b", "data")


def test_what_one_host_publishes_the_other_reads(area: Path, s3: Any) -> None:
    """Files and manifest go up, and come down verified."""
    outcomes = run(area, hosts(area), f"{HERE}:job_publish", mounts={"data": {"access": "write"}})
    assert value(outcomes) == [0, 1, 2, 3]
    keys = {entry["Key"] for entry in s3.list_objects_v2(Bucket=s3server.BUCKET)["Contents"]}
    assert keys == {"prefix/v1/x", "prefix/v1/.mmrpc-manifest.json"}
