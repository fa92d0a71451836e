"""Claims: one holder at a time, and none that is dead."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from mmrpc.core.system import host
from mmrpc.data import claims
from mmrpc.errors import PathExistsError, PathNotFoundError


def _dead() -> bytes:
    """The claim of a process of this host that has ended."""
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    pid, started = process.pid, host.start_time(process.pid or 0)
    process.join(60)
    return json.dumps({"host": host.memory_host_id(), "pid": pid, "started": started}).encode()


def test_one_at_a_time(tmp_path: Path) -> None:
    """A second claim names the first holder; a released one is free."""
    path = str(tmp_path / "c")
    claims.claim(path, "it")
    with pytest.raises(PathExistsError, match=f"it is being written by process {os.getpid()}"):
        claims.claim(path, "it")
    claims.release(path)
    claims.claim(path, "it")
    claims.release(path)
    claims.release(path)
    assert os.listdir(tmp_path) == []


def test_the_dead_hold_nothing(tmp_path: Path) -> None:
    """The claim of a process that has died is taken over by exactly one of many who try at once."""
    path, dead = tmp_path / "c", _dead()
    for _ in range(60):
        path.write_bytes(dead)
        taken: list[int] = []
        barrier = threading.Barrier(8)

        def take(barrier: threading.Barrier = barrier, taken: list[int] = taken) -> None:
            barrier.wait(30)
            try:
                claims.claim(str(path), "it")
            except PathExistsError:
                return
            taken.append(1)

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(taken) == 1
        assert json.loads(path.read_bytes())["pid"] == os.getpid()
        assert os.listdir(tmp_path) == ["c"]
        claims.release(str(path))


def test_a_claim_that_changed_hands_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who saw a dead claim does not replace the living one that took its place meanwhile."""
    path = tmp_path / "c"
    path.write_bytes(_dead())
    lock = fcntl.flock
    mine: list[bytes] = []

    def overtaken(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        claims.claim(str(path), "it")
        mine.append(path.read_bytes())
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with pytest.raises(PathExistsError, match=f"by process {os.getpid()}"):
        claims.claim(str(path), "it")
    assert path.read_bytes() == mine[0]


def test_one_takes_over_at_a_time(tmp_path: Path) -> None:
    """While another holds the lock on a dead claim, taking it over is refused, not waited for."""
    path = tmp_path / "c"
    path.write_bytes(_dead())
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PathExistsError, match="being taken over"):
            claims.claim(str(path), "it")
    claims.claim(str(path), "it")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "malformed"),
        (b"[]", "malformed"),
        (b'{"host": "0123456789abcdef", "pid": 1, "started": 1}', "process 1 on another host"),
    ],
)
def test_what_cannot_be_known_is_left(tmp_path: Path, text: bytes, match: str) -> None:
    """Claims of other hosts, and malformed ones, are for people to remove."""
    path = tmp_path / "c"
    path.write_bytes(text)
    with pytest.raises(PathExistsError, match=match):
        claims.claim(str(path), "it")
    assert path.read_bytes() == text


def test_no_directory(tmp_path: Path) -> None:
    """A claim in a missing directory is an error of its own."""
    with pytest.raises(PathNotFoundError):
        claims.claim(str(tmp_path / "none" / "c"), "it")
