"""The README does what it says."""

from __future__ import annotations

import re
import tomllib

import pytest

from mmrpc.testing import free_port
from tests.documents import ROOT, blocks, run

README = ROOT / "README.md"


@pytest.mark.timeout(110)
def test_example_runs(tmp_path) -> None:
    """The example is complete, and prints what the shared tensor then holds."""
    (example,) = blocks(README, "python")
    printed = run(example.replace("29500", str(free_port())), tmp_path)
    assert printed.split(" ", 1)[0] == "1000000.0"
    assert printed.strip().endswith(str(tmp_path / "x.mm"))


def test_commands_are_targets() -> None:
    """Every make target that the README names is in the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^    make (\w+)", README.read_text(), re.MULTILINE))
    assert named
    assert named <= targets


def test_extras_exist() -> None:
    """Every extra that the README names is in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r'"\.\[(\w+)\]"', README.read_text())) <= set(
        project["optional-dependencies"]
    )
