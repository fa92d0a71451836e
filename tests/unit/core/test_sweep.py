"""Temporary names, and the removal of those that nobody will finish."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mmrpc.core import sweep
from mmrpc.core.system import host
from tests.peers import Peer


def touch(path: str) -> str:
    Path(path).touch()
    return path


def part_of(directory: str) -> str:
    return touch(sweep.part_name(f"{directory}/x"))


def test_part_of_a_living_process_stays(tmp_path: Path, peer: Peer) -> None:
    """What a process that lives is writing is left alone."""
    mine, theirs = part_of(str(tmp_path)), peer.call(part_of, str(tmp_path))
    assert mine != theirs
    assert not sweep.is_stale(mine)
    assert sweep.sweep(str(tmp_path)) == []
    assert len(os.listdir(tmp_path)) == 2


def test_part_of_a_dead_process_goes(tmp_path: Path) -> None:
    """What a killed process left behind is recognised and removed."""
    with Peer() as peer:
        part = peer.call(part_of, str(tmp_path))
        peer.kill()
    assert sweep.is_stale(part)
    assert sweep.sweep(str(tmp_path)) == [os.path.basename(part)]
    assert os.listdir(tmp_path) == []


def test_reused_pid_is_not_the_maker(tmp_path: Path) -> None:
    """A process that got the PID of a dead one does not keep its files alive."""
    part = sweep.part_name(f"{tmp_path}/x").replace(
        f"-{host.own_start_time()}-", f"-{host.own_start_time() - 1}-"
    )
    assert sweep.is_stale(touch(part))


@pytest.mark.parametrize(("age_h", "stale"), [(1, False), (25, True)])
def test_part_of_another_host(age_h: int, stale: bool, tmp_path: Path) -> None:
    """Of another host's files only the age is known; a day is enough."""
    part = touch(sweep.part_name(f"{tmp_path}/x").replace(host.memory_host_id(), "0" * 16))
    then = time.time() - age_h * 3600
    os.utime(part, (then, then))
    assert sweep.is_stale(part) is stale


@pytest.mark.parametrize("name", ["x.part", ".mmrpc-x.part", ".mmrpc-mount", "data.bin"])
def test_files_of_others(name: str, tmp_path: Path) -> None:
    """A file that is not ours is never removed, whatever it is called."""
    touch(f"{tmp_path}/{name}")
    assert not sweep.is_stale(f"{tmp_path}/{name}")
    assert sweep.sweep(str(tmp_path)) == []


def test_missing_directory() -> None:
    """To sweep what is not there is no error."""
    assert sweep.sweep("/nowhere/at/all") == []


def test_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process looks through a directory once, not for every file that it makes."""
    monkeypatch.setattr(sweep, "_swept", set())
    sweep.sweep_once(str(tmp_path))
    with Peer() as peer:
        peer.call(part_of, str(tmp_path))
    sweep.sweep_once(str(tmp_path))
    assert len(os.listdir(tmp_path)) == 1
