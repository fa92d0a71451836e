"""Directories of a training that somebody or something damaged: gone on from, or a typed error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mmrpc.errors import LayoutError, NotRegularFileError, PathNotFoundError
from mmrpc.train.state import FILE_NAME, TrainingState
from mmrpc.train.version import latest
from mmrpc.train.versions import Versions

CURRENT, NEWEST, OLDER = "CURRENT", "v000000000001.safetensors", "v000000000000.safetensors"


def open_state(directory: Path, *, trust_live: bool) -> TrainingState:
    torch.manual_seed(0)
    return TrainingState(
        nn.Linear(2, 2),
        lambda params: torch.optim.Adam(params, lr=0.1),
        str(directory),
        Versions(directory),
        resume=True,
        trust_live=trust_live,
    )


@pytest.fixture
def directory(tmp_path) -> Path:
    """A training that made one step, with a version before and after it."""
    state, versions = open_state(tmp_path, trust_live=True), Versions(tmp_path)
    versions.publish(0, state.arena)
    state.module(torch.ones(1, 2)).sum().backward()
    state.step()
    versions.publish(1, state.arena)
    return tmp_path


def write(data: bytes) -> Callable[[Path], None]:
    return lambda path: (path.unlink(), path.write_bytes(data))


def cut(path: Path) -> None:
    write(path.read_bytes()[:-4])(path)


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def as_the_newest(path: Path) -> None:
    shutil.copy(path.parent / NEWEST, path)


@pytest.mark.parametrize("trust_live", [True, False])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (CURRENT, write(b"damaged")),
        (CURRENT, Path.unlink),
        (OLDER, cut),
        (FILE_NAME, Path.unlink),
        (FILE_NAME, cut),
        (FILE_NAME, write(b"")),
        (FILE_NAME, write(bytes(4096))),
        (FILE_NAME, as_the_newest),
    ],
)
def test_what_is_not_needed_may_be_damaged(directory, name, damage, trust_live: bool) -> None:
    """The training goes on from the newest version, and publishes the next."""
    damage(directory / name)
    state = open_state(directory, trust_live=trust_live)
    assert state.resumed_from == state.step_number == 1
    Versions(directory).publish(2, state.arena)
    assert latest(directory).number == 2


@pytest.mark.parametrize(
    ("name", "damage", "error"),
    [
        (NEWEST, write(b""), LayoutError),
        (NEWEST, cut, LayoutError),
        (NEWEST, write(bytes(4096)), LayoutError),
        (NEWEST, as_directory, NotRegularFileError),
        (NEWEST, as_fifo, NotRegularFileError),
        (NEWEST, as_link, NotRegularFileError),
        (FILE_NAME, as_directory, NotRegularFileError),
        (FILE_NAME, as_fifo, NotRegularFileError),
    ],
)
def test_what_would_be_a_step_back_is_an_error(directory, name, damage, error) -> None:
    """It names the file; nothing is waited for, and nothing is deleted."""
    damage(directory / name)
    left = sorted(os.listdir(directory))
    with pytest.raises(error, match=name):
        open_state(directory, trust_live=True)
    assert sorted(os.listdir(directory)) == left


@pytest.mark.parametrize("trust_live", [True, False])
def test_versions_that_were_deleted(directory, trust_live: bool) -> None:
    """With the live file nothing is lost; where only versions count, there is no training."""
    for name in (NEWEST, OLDER):
        (directory / name).unlink()
    assert open_state(directory, trust_live=trust_live).resumed_from == (1 if trust_live else None)


def test_a_version_that_is_announced_and_deleted(directory) -> None:
    """A reader is told the file's name, and does not get an older one instead."""
    (directory / NEWEST).unlink()
    with pytest.raises(PathNotFoundError, match=NEWEST):
        latest(directory)
