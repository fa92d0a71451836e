"""Training over two hosts that see one directory at different places."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmrpc import rpc
from mmrpc.train import ParameterServer, Publisher, Trainer, Version, follow
from tests.distributed import hosting
from tests.distributed.hosting import Host, run, value
from tests.distributed.test_train import adam, alone, assert_close, loss_of, model, samples, values
from tests.needs import needs

pytestmark = [needs("namespaces"), pytest.mark.timeout(180)]
HERE = "tests.distributed.test_train_hosts"
STEPS = 5


@pytest.fixture
def area() -> Iterator[Path]:
    with hosting.area() as path:
        for name in ("shared", "at-a", "at-b", "only-a"):
            (path / name).mkdir()
        yield path


def hosts(area: Path) -> dict[str, Host]:
    shared, at_a, at_b = (str(area / name) for name in ("shared", "at-a", "at-b"))
    only = (str(area / "only-a"),)
    return {
        "a": Host({"params": at_a}, {shared: at_a}),
        "b": Host({"params": at_b}, {shared: at_b}, hides=only),
    }


def train_on_b() -> tuple[str, str | None, list[torch.Tensor]]:
    torch.set_num_threads(1)
    with Trainer(model(), "a") as trainer:
        for step in range(STEPS):
            loss_of(trainer.module, *samples(step)).backward()
            trainer.step()
        storage = trainer.module[0].weight.untyped_storage()
        path = storage._mapping.path if hasattr(storage, "_mapping") else None
        return str(trainer.link), path, values(trainer.module)


def job_train(directory: str) -> Any:
    torch.set_num_threads(1)
    with ParameterServer(model(), adam, directory, consistency="live") as server:
        link, path, theirs = rpc.rpc_sync("b", train_on_b)
        assert_close(theirs, alone(adam, STEPS))
        assert_close(values(server.module), theirs)
        return link, path, server.version.number


@pytest.mark.parametrize("place", ["at-a", "only-a"])
def test_a_trainer_on_another_host(area, place: str) -> None:
    """It maps published versions through its own mount, or is sent values where it has none."""
    directory = str(area / place / "training")
    job = f"{HERE}:job_train"
    link, path, version = value(
        run(area, hosts(area), job, directory, mounts={"params": {"access": "write"}})
    )
    if place == "at-a":
        assert link == "parameters published, gradients values: it is on another host"
        assert path == str(area / "at-b" / "training" / f"v{STEPS:012d}.safetensors")
    else:
        assert link == "parameters values, gradients values: it cannot map the server's files"
        assert path is None
    assert version >= 0


_follower: Any = None


def follow_on_b(directory: str) -> tuple[int, float]:
    global _follower
    module = nn.Linear(2, 2)
    _follower = _follower or follow(directory, module)
    version = _follower.wait(60)
    return version.number, version.tensors["weight"].sum().item()


def open_on_b(version: Version) -> tuple[str, float]:
    return version.filename, version.tensors["weight"].sum().item()


def job_follow(at_a: str, at_b: str) -> Any:
    module = nn.Linear(2, 2)
    publisher = Publisher(module, f"{at_a}/weights", keep=1)
    seen = []
    for number in range(3):
        with torch.no_grad():
            module.weight.fill_(number)
        version = publisher.publish()
        seen.append(rpc.rpc_sync("b", follow_on_b, (f"{at_b}/weights",)))
    held = list(publisher.followers().values())
    return seen, held, rpc.rpc_sync("b", open_on_b, (version,))


def test_a_follower_on_another_host(area) -> None:
    """It follows in its own directory, its lease is seen, and a version travels as a reference."""
    at_a, at_b = str(area / "at-a"), str(area / "at-b")
    seen, held, (filename, total) = value(
        run(
            area,
            hosts(area),
            f"{HERE}:job_follow",
            at_a,
            at_b,
            mounts={"params": {"access": "write"}},
        )
    )
    assert seen == [[0, 0], [1, 4], [2, 8]]
    assert held == [2]
    assert filename == f"{at_b}/weights/v{2:012d}.safetensors"
    assert total == 8
