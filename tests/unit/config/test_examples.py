"""The examples in configs/: each is valid, and shows what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrpc.config import load_config

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_example_loads(path):
    """Each example is valid, is named like its file, and starts at least one worker."""
    cluster = load_config(path)
    assert cluster.name == path.stem
    assert cluster.workers()


def test_the_examples_are_there():
    """The examples that the documentation names exist."""
    assert {path.stem for path in CONFIGS} >= {"local", "two-nodes", "s3", "slurm", "digits"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_example_is_explained(path):
    """Each example begins with a comment that says what it is."""
    assert path.read_text().startswith("# ")
