"""Several hosts: what is one directory for all, what is not, and what each may do there.

A host is a mount namespace: paths and identities mean nothing from one to the other until the
handshake has proven a mount.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrpc import MemoryMappedTensor, rpc
from mmrpc.errors import MmrpcError
from tests.distributed import hosting
from tests.distributed.hosting import Host, describe, run, value
from tests.needs import needs
from tests.peers import NOBODY

pytestmark = [needs("namespaces"), pytest.mark.timeout(180)]
HERE = "tests.distributed.test_hosts"
WRITE = {"data": {"access": "write"}}
READ = {"data": {"access": "read"}}


@pytest.fixture
def area() -> Iterator[Path]:
    """``shared`` and ``other``, and the places where hosts have them."""
    with hosting.area() as path:
        for name in ("shared", "other", "at-a", "at-b", "here"):
            (path / name).mkdir()
            (path / name).chmod(0o777)
        yield path


def a_and_b(area: Path, **of_b: Any) -> dict[str, Host]:
    """Two hosts that have one directory at different places."""
    shared = str(area / "shared")
    at_a, at_b = str(area / "at-a"), str(area / "at-b")
    b: dict[str, Any] = {"mounts": {"data": at_b}, "binds": {shared: at_b}, **of_b}
    return {
        "a": Host({"data": at_a}, {shared: at_a}, hides=(str(area / "here"),)),
        "b": Host(hides=(str(area / "here"),), **b),
    }


# What runs on b.


def double(tensor: torch.Tensor) -> tuple[float, str | None]:
    """Doubles in place; tells the sum and where the tensor is on this host."""
    tensor *= 2
    return tensor.sum().item(), tensor.untyped_storage().filename


def total(tensor: torch.Tensor) -> float:
    return tensor.sum().item()


def made_on_b(path: str) -> MemoryMappedTensor:
    return MemoryMappedTensor.from_tensor(torch.ones(3), filename=path)


# What runs on a.


def make(path: str, size: int = 4) -> MemoryMappedTensor:
    return MemoryMappedTensor.from_tensor(torch.arange(float(size)), filename=path)


def job_share(at_a: str, at_b: str) -> Any:
    tensor = make(f"{at_a}/x")
    there = rpc.rpc_sync("b", double, (tensor,))
    back = rpc.rpc_sync("b", made_on_b, (f"{at_b}/y",))
    return there, tensor.tolist(), back.filename, back.tolist()


def outcome_of(function: Any, *args: Any) -> Any:
    try:
        return rpc.rpc_sync("b", function, args)
    except MmrpcError as error:
        return describe(error)


def job_outcomes(at_a: str, mode: int) -> Any:
    """Sends one file with both modes, with these permission bits."""
    tensor = make(f"{at_a}/x")
    os.chmod(f"{at_a}/x", mode)
    shared = outcome_of(total, tensor)
    read = MemoryMappedTensor.from_filename(f"{at_a}/x", torch.float32, (4,), mode="r")
    return shared, outcome_of(total, read), outcome_of(total, torch.ones(2))


def job_unshared(path: str) -> Any:
    return outcome_of(total, make(path)), outcome_of(total, MemoryMappedTensor.zeros(3))


def job_stale(at_a: str) -> Any:
    """Sends references to files that change after they were mapped here."""
    found = []
    for change in ("delete", "replace", "shorten"):
        reference = make(f"{at_a}/{change}").ref()
        if change == "shorten":
            os.truncate(f"{at_a}/{change}", 3)
        else:
            os.unlink(f"{at_a}/{change}")
        if change == "replace":
            make(f"{at_a}/{change}")
        found.append(outcome_of(open_reference, reference))
    return found


def open_reference(reference: Any) -> float:
    return total(reference.open())


def job_report() -> Any:
    return [report.model_dump(mode="json") for report in rpc.path_report().mounts]


def test_one_directory_at_two_places(area: Path) -> None:
    """A tensor is one on both hosts, each naming it by its own path, in both directions."""
    outcomes = run(
        area,
        a_and_b(area),
        f"{HERE}:job_share",
        str(area / "at-a"),
        str(area / "at-b"),
        mounts=WRITE,
    )
    there, here, path, back = value(outcomes)
    assert there == [12.0, str(area / "at-b" / "x")]
    assert here == [0, 2, 4, 6]
    assert (path, back) == (str(area / "at-a" / "y"), [1, 1, 1])


def test_the_report_says_what_was_proven(area: Path) -> None:
    """Paths differ, the file system does not, and inode numbers can be compared."""
    reports = value(run(area, a_and_b(area), f"{HERE}:job_report", mounts=WRITE))
    assert {report["node"]: report["path"] for report in reports} == {
        "a": str(area / "at-a"),
        "b": str(area / "at-b"),
    }
    assert all(report["same_as_others"] and report["inode_comparable"] for report in reports)
    assert os.listdir(area / "shared") == []


def test_a_host_without_the_directory(area: Path) -> None:
    """Before anything is sent, every rank raises the same error, which names the place."""
    missing = str(area / "nowhere")
    hosts = a_and_b(area, mounts={"data": missing}, binds={})
    outcomes = run(area, hosts, f"{HERE}:job_report", mounts=WRITE)
    errors = [outcome["error"] for outcome in outcomes.values()]
    assert errors[0] == errors[1]
    assert errors[0]["type"] == "HandshakeError"
    assert (errors[0]["node"], errors[0]["mount"]) == ("b", "data")
    assert errors[0]["path"] == missing
    assert "nodes.b.mounts.data" in errors[0]["text"]


def test_another_directory_of_the_same_name(area: Path) -> None:
    """Two directories that look alike at the same path are told apart."""
    here = str(area / "here")
    hosts = {
        "a": Host({"data": here}, {str(area / "shared"): here}),
        "b": Host({"data": here}, {str(area / "other"): here}),
    }
    outcomes = run(
        area,
        hosts,
        f"{HERE}:job_report",
        mounts=WRITE,
        rpc={"visibility_timeout_s": 1},
    )
    for outcome in outcomes.values():
        assert outcome["error"]["type"] == "HandshakeError"
        assert (outcome["error"]["node"], outcome["error"]["path"]) == ("b", here)
    assert os.listdir(area / "shared") == os.listdir(area / "other") == []


def test_a_host_that_may_only_read(area: Path) -> None:
    """Where the mount is read-only, shared writes are refused, and reading works."""
    hosts = a_and_b(area, read_only=(str(area / "at-b"),))
    outcomes = run(area, hosts, f"{HERE}:job_outcomes", str(area / "at-a"), 0o644, mounts=READ)
    shared, read, plain = value(outcomes)
    assert (shared["type"], shared["node"]) == ("PathNotWritableError", "b")
    assert shared["path"] == str(area / "at-b" / "x")
    assert (read, plain) == (6.0, 2.0)


def test_a_host_that_should_write_and_may_not(area: Path) -> None:
    """If the config asks for writing, a read-only mount ends the handshake."""
    hosts = a_and_b(area, read_only=(str(area / "at-b"),))
    outcomes = run(area, hosts, f"{HERE}:job_report", mounts=WRITE)
    for outcome in outcomes.values():
        assert (outcome["error"]["type"], outcome["error"]["node"]) == ("HandshakeError", "b")


@pytest.mark.parametrize(
    ("mode", "shared", "read"),
    [(0o600, "PathNotWritableError", "PathNotReadableError"), (0o644, "PathNotWritableError", 6.0)],
)
def test_a_host_where_we_are_another_user(area: Path, mode: int, shared: str, read: Any) -> None:
    """What the other user may not do is said by the caller's exception, with the node's name."""
    hosts = a_and_b(area, user=NOBODY)
    outcomes = run(area, hosts, f"{HERE}:job_outcomes", str(area / "at-a"), mode, mounts=READ)
    found = value(outcomes)
    assert (found[0]["type"], found[0]["node"]) == (shared, "b")
    assert (found[1] if isinstance(found[1], float) else found[1]["type"]) == read
    assert found[2] == 2.0


def test_what_is_in_no_mount_is_not_shared(area: Path) -> None:
    """Files elsewhere and memory are refused, and the error names a mount that would do."""
    outcomes = run(
        area, a_and_b(area), f"{HERE}:job_unshared", str(area / "here" / "x"), mounts=WRITE
    )
    for error in value(outcomes):
        assert error["type"] == "NotSharedError"
        assert error["node"] == "b"
    assert "mount 'data'" in value(outcomes)[0]["text"]


def test_what_changed_on_the_way(area: Path) -> None:
    """Deleted, replaced and shortened files are three errors; none gives other bytes."""
    outcomes = run(area, a_and_b(area), f"{HERE}:job_stale", str(area / "at-a"), mounts=WRITE)
    assert [error["type"] for error in value(outcomes)] == [
        "PathNotFoundError",
        "StaleReferenceError",
        "FileTooShortError",
    ]
