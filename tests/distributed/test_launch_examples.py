"""The example jobs, run here, on two ssh nodes and under Slurm by their configs alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrpc.config import dump_config, load_config
from tests.distributed import sshd
from tests.distributed.launching import PYTHON, Launch, launching
from tests.distributed.slurmd import Slurm
from tests.needs import needs

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 280.0
pytestmark = pytest.mark.timeout(300)


def _echoed(launch: Launch) -> None:
    assert launch.code(_PATIENCE_S) == 0, launch.text
    said = [line for line in launch.lines if "sent 4194304 bytes as" in line]
    assert [line.split()[0] for line in sorted(said)] == ["client0", "client1"]
    assert all(line.endswith("the server wrote 2, and found 2.09715e+06 in all") for line in said)


def _learned(launch: Launch) -> None:
    # It fails if it has not learned enough.
    assert launch.code(_PATIENCE_S) == 0, launch.text
    assert any("held-out accuracy" in line for line in launch.lines)


Check = Callable[[Launch], None]


def _resolved(name: str, settings: list[str]) -> dict[str, Any]:
    """A config of ours, with what only the reader's machines can tell."""
    return dump_config(load_config(ROOT / "configs" / name, set=settings))


def test_echo_here(tmp_path: Path) -> None:
    """As it stands, but for the directory of the example and that of its files."""
    settings = [f"nodes.here.cwd={ROOT}", f"nodes.here.mounts.scratch={tmp_path}"]
    with launching(tmp_path, _resolved("local.yaml", settings)) as launch:
        _echoed(launch)


@needs("sshd")
@pytest.mark.parametrize(
    ("config", "mount", "check"),
    [("echo-ssh.yaml", "scratch", _echoed), ("digits-ssh.yaml", "params", _learned)],
)
def test_on_two_ssh_nodes(tmp_path: Path, config: str, mount: str, check: Check) -> None:
    """The master's address, and where things are on each node, are all that differs."""
    (tmp_path / "shared").mkdir()
    with sshd.serving(tmp_path / "sshd-a") as a, sshd.serving(tmp_path / "sshd-b") as b:
        settings = []
        for name, server in (("a", a), ("b", b)):
            values = {
                "host": "127.0.0.1",
                "python": PYTHON,
                "cwd": ROOT,
                "log_dir": tmp_path / f"logs-{name}",
                f"mounts.{mount}": tmp_path / "shared",
                "ssh.port": server.port,
                "ssh.config_file": server.config_file,
            }
            settings += [f"nodes.{name}.{key}={value}" for key, value in values.items()]
        with launching(tmp_path, _resolved(config, settings)) as launch:
            check(launch)
    assert list((tmp_path / "logs-b").glob("*/b/*1/stdout.log"))
    assert not list((tmp_path / "shared").iterdir())


@needs("slurm")
@pytest.mark.parametrize(
    ("config", "mount", "check"),
    [("echo-slurm.yaml", "scratch", _echoed), ("digits-slurm.yaml", "params", _learned)],
)
def test_under_slurm(tmp_path: Path, slurm: Slurm, config: str, mount: str, check: Check) -> None:
    """Inside an allocation, the config says only where the shared directory is."""
    (tmp_path / "shared").mkdir()
    settings = ["launch.sbatch_options=[]"]
    for name in ("n0", "n1"):
        values = {
            f"mounts.{mount}": tmp_path / "shared",
            "cwd": ROOT,
            "log_dir": tmp_path / "logs",
        }
        settings += [f"nodes.{name}.{key}={value}" for key, value in values.items()]
    prefix = ("salloc", "--quiet", "--nodes=2")
    resolved = _resolved(config, settings)
    with launching(tmp_path, resolved, env=slurm.env, prefix=prefix) as launch:
        check(launch)
    status = json.loads(next((tmp_path / "runs").glob("*/status.json")).read_text())
    assert sorted(status["nodes"]) == ["n0", "n1"]
