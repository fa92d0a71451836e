"""One process publishes weights, others follow: never half a version, and never one deleted."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmrpc.errors import ConfigError, LayoutError, MmrpcError, PathExistsError, StaleReferenceError
from mmrpc.train import Publisher, Version, follow, latest
from tests.peers import Peer

pytestmark = pytest.mark.timeout(120)
SIZE = 300_000
VERSIONS = 60


def weights(value: float = 0.0) -> nn.Module:
    module = nn.Module()
    module.a = nn.Parameter(torch.full((SIZE,), value))
    module.b = nn.Parameter(torch.full((SIZE,), value))
    module.register_buffer("seen", torch.full((SIZE,), value))
    return module


def publish_all(directory: str) -> None:
    """Publishes as fast as it can; each version has one value everywhere."""
    torch.set_num_threads(1)
    module = weights()
    publisher = Publisher(module, directory, keep=1, durable=False)
    for number in range(VERSIONS):
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.fill_(number)
        publisher.publish(number)


def follow_all(directory: str) -> tuple[int, int, list[int]]:
    """Reads each version that it gets; gives how many were good, how many torn, and which."""
    torch.set_num_threads(1)
    module = weights(-1.0)
    good, torn, numbers = 0, 0, []
    with follow(directory, module, poll_s=0) as follower:
        while not numbers or numbers[-1] < VERSIONS - 1:
            version = follower.wait(60)
            assert version is not None
            numbers.append(version.number)
            for _ in range(3):  # also while newer ones are written and this one is set aside
                values = torch.cat([tensor.detach() for tensor in module.state_dict().values()])
                is_whole = bool((values == version.number).all())
                good, torn = good + is_whole, torn + (not is_whole)
    return good, torn, numbers


def test_no_version_is_ever_torn(tmp_path) -> None:
    """Three followers of a busy publisher read only whole versions, in order, to the last."""
    with contextlib.ExitStack() as stack:
        followers = [stack.enter_context(Peer()) for _ in range(3)]
        publisher = stack.enter_context(Peer())
        for follower in followers:
            follower.start(follow_all, str(tmp_path / "v"))
        publisher.call(publish_all, str(tmp_path / "v"))
        for follower in followers:
            good, torn, numbers = follower.result()
            assert torn == 0
            assert good == 3 * len(numbers)
            assert numbers == sorted(set(numbers))
    left = sorted(name for name in os.listdir(tmp_path / "v") if name.startswith("v"))
    assert len(left) <= 2 + len(followers)


def hold(directory: str) -> tuple[int, str]:
    global _held
    _held = follow(directory)
    version = _held.wait(60)
    return version.number, version.filename


_held: Any = None


def test_a_follower_keeps_its_version_and_its_death_frees_it(tmp_path) -> None:
    """What a follower has is not deleted while it lives; when it is killed, it is."""
    publisher = Publisher(nn.Linear(2, 2), tmp_path, keep=1)
    publisher.publish()
    with Peer() as peer:
        number, filename = peer.call(hold, str(tmp_path))
        assert number == 0
        assert list(publisher.followers().values()) == [0]
        assert publisher.wait_for_followers(1, 30)
        publisher.publish()
        publisher.publish()
        assert os.path.exists(filename) or os.path.exists(filename + ".retired")
        assert not publisher.wait_for_followers(1, 0.05)
        peer.kill()
    publisher.publish()
    assert publisher.followers() == {}
    assert not os.path.exists(filename)
    assert not os.path.exists(filename + ".retired")


def test_followers_share_the_pages(tmp_path) -> None:
    """A module that follows has its parameters in the version's file, not in a copy."""
    source, target = nn.Linear(4, 4), nn.Linear(4, 4)
    version = Publisher(source, tmp_path).publish(7)
    with follow(tmp_path, target) as follower:
        assert follower.update()
        assert not follower.update()
        assert follower.current.number == 7
    storage = target.weight.untyped_storage()
    assert storage._mapping.path == version.filename
    assert torch.equal(target.weight, source.weight)
    x = torch.randn(3, 4)
    target(x).sum().backward()
    assert target.weight.grad is not None


def load_and_sum(version: Version) -> float:
    module = nn.Linear(4, 4)
    version.load_into(module)
    return module.weight.sum().item()


def test_a_version_travels_as_a_reference(tmp_path) -> None:
    """A learner can also send the version itself; the receiver maps it."""
    source = nn.Linear(4, 4)
    version = Publisher(source, tmp_path).publish()
    with Peer() as peer:
        assert peer.call(load_and_sum, version) == pytest.approx(source.weight.sum().item())


def test_a_publisher_goes_on_counting(tmp_path) -> None:
    """Started again, it neither repeats a number nor goes back."""
    module = nn.Linear(2, 2)
    Publisher(module, tmp_path).publish(5)
    again = Publisher(module, tmp_path)
    assert again.version == 5
    with pytest.raises(ValueError, match="version 5 does not come after version 5"):
        again.publish(5)
    assert again.publish().number == 6
    with pytest.raises(PathExistsError, match="another parameter server or publisher"):
        Publisher(module, tmp_path)
    again.close()
    with pytest.raises(MmrpcError, match="the publisher was closed"):
        again.publish()
    with pytest.raises(LayoutError, match="the version in"):
        Publisher(nn.Linear(3, 3), tmp_path)
    with Publisher(module, tmp_path) as third:
        assert third.publish().number == 7


def test_what_a_publisher_refuses(tmp_path) -> None:
    """Numbers and modules that cannot be are refused, and followers keep what they have."""
    with Publisher(nn.Linear(2, 2), tmp_path) as publisher:
        publisher.publish()
        for number in (-1, True, 1.5, "2", 10**12):
            with pytest.raises(ConfigError, match=r"^version: "):
                publisher.publish(number)
        publisher.module.extra = nn.Parameter(torch.ones(1))
        with pytest.raises(LayoutError, match="the module now has 'extra' in addition"):
            publisher.publish()
        del publisher.module.extra
        for count, timeout_s in ((-1, 0), (1, float("nan")), (1, -1)):
            with pytest.raises(ConfigError):
                publisher.wait_for_followers(count, timeout_s)
        assert latest(tmp_path).number == 0


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "poll_s": [float("nan"), -1, None],
        "visibility_timeout_s": [-1, "1"],
        "verify": [1, None],
        "module": ["x", nn.Linear],
    }.items(),
)
def test_what_a_follower_refuses(tmp_path, name: str, values: list[Any]) -> None:
    """An argument that cannot be is named; a time that is none is not waited for."""
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name}: "):
            follow(tmp_path, **{name: value})
    with follow(tmp_path) as follower, pytest.raises(ConfigError, match=r"^timeout_s: "):
        follower.wait(float("nan"))


def test_hooks_see_each_version_before_others_do(tmp_path) -> None:
    """The publisher's comes before the announcement, the follower's before the file is read."""
    seen: list[tuple[str, int | None]] = []

    def written(path: str) -> None:
        assert Version.open(path).number == len(seen) // 2
        found = latest(tmp_path)
        seen.append(("written", None if found is None else found.number))

    def read(path: str) -> None:
        seen.append(("read", Version.open(path).number))

    with (
        Publisher(nn.Linear(2, 2), tmp_path, post_write=written) as publisher,
        follow(tmp_path, pre_read=read) as follower,
    ):
        for _ in range(2):
            publisher.publish()
            assert follower.update()
    assert seen == [("written", None), ("read", 0), ("written", 0), ("read", 1)]


def test_a_hook_that_fails_announces_nothing(tmp_path) -> None:
    """What was written is not found by anybody, and the number is used again."""
    problems = [OSError("the mirror is away")]

    def mirror(_: str) -> None:
        while problems:
            raise problems.pop()

    module = nn.Linear(2, 2)
    with Publisher(module, tmp_path, post_write=mirror) as publisher:
        with pytest.raises(OSError, match="mirror"):
            publisher.publish()
        assert latest(tmp_path) is None
        with torch.no_grad():
            module.weight.fill_(3)
        assert publisher.publish().number == 0
    assert latest(tmp_path).tensors["weight"].unique().tolist() == [3]


def test_a_follower_that_verifies_takes_proven_bytes_only(tmp_path) -> None:
    """A version that was changed on its way is refused, and the module keeps the one before."""
    module, mine = nn.Linear(2, 2), nn.Linear(2, 2)
    with (
        Publisher(module, tmp_path, digest=True) as publisher,
        follow(tmp_path, mine, verify=True) as follower,
    ):
        publisher.publish()
        assert follower.update()
        path = publisher.publish().filename
        data = bytearray(Path(path).read_bytes())
        data[-1] ^= 1
        os.unlink(path)
        Path(path).write_bytes(data)
        with pytest.raises(StaleReferenceError, match="its bytes have sha256:"):
            follower.update()
        assert follower.current.number == 0
        assert list(publisher.followers().values()) == [0]
        assert torch.equal(mine.weight, module.weight)
        publisher.publish()
        assert follower.update()


def test_a_directory_that_was_begun_anew_is_noticed(tmp_path) -> None:
    """Another training's version is taken, also if its number is that of the one before."""
    module = nn.Linear(2, 2)
    directory = tmp_path / "v"
    with follow(directory, nn.Linear(2, 2)) as follower:
        for value in (1.0, 2.0):
            with torch.no_grad():
                module.weight.fill_(value)
            with Publisher(module, directory) as publisher:
                publisher.publish(4)
            assert follower.update()
            assert not follower.update()
            assert follower.current.tensors["weight"].unique().tolist() == [value]
            shutil.rmtree(directory)


def test_following_may_begin_first(tmp_path) -> None:
    """A follower of a directory that is not there yet waits for it."""
    with follow(tmp_path / "later", poll_s=0.001) as follower:
        assert follower.wait(0.01) is None
        Publisher(nn.Linear(2, 2), tmp_path / "later").publish()
        assert follower.wait(30).number == 0
        assert next(iter_in_time(follower, tmp_path)).number == 1


def iter_in_time(follower: Any, tmp_path: Any) -> Iterator[Version]:
    Publisher(nn.Linear(2, 2), tmp_path / "later").publish()
    yield from follower


def killed_while_publishing(directory: str, pipe: Connection) -> None:
    module = weights()
    publisher = Publisher(module, directory, keep=1, durable=False)
    number = publisher.version or 0
    while True:
        number += 1
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.fill_(number)
        publisher.publish(number)
        pipe.send(number)


def test_a_publisher_that_is_killed_leaves_whole_versions(tmp_path) -> None:
    """Killed at any point, what followers find is whole, and the next publisher goes on."""
    context = multiprocessing.get_context("forkserver")
    module = weights(-1.0)
    with follow(tmp_path, module, poll_s=0) as follower:
        for delay_s in (0.0, 0.003, 0.007):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=killed_while_publishing, args=(str(tmp_path), send))
            process.start()
            try:
                first = receive.recv()
                time.sleep(delay_s)  # anywhere in the next versions
            finally:
                process.kill()
                process.join()
            follower.update()
            assert follower.current.number >= first
            for tensor in module.state_dict().values():
                assert (tensor == follower.current.number).all()
