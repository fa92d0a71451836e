"""The example job, run on this machine, on two ssh nodes and under Slurm by its configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmrpc.config import dump_config, load_config
from tests.distributed import slurmd, sshd
from tests.distributed.launching import PYTHON, Launch, assert_nobody_left, launching
from tests.needs import needs

ROOT = Path(__file__).parents[2]


def _resolved(name: str, *settings: str) -> dict[str, Any]:
    """A config of ours, with what only the reader's machines can tell."""
    return dump_config(load_config(ROOT / "configs" / name, set=settings))


def _assert_echoed(launch: Launch) -> None:
    assert launch.code() == 0, launch.text
    said = [line for line in launch.lines if "sent 4194304 bytes as" in line]
    assert [line.split()[0] for line in sorted(said)] == ["client0", "client1"]
    assert all(line.endswith("the server wrote 2, and found 2.09715e+06 in all") for line in said)
    assert_nobody_left(launch.directory)


def test_on_this_machine(tmp_path: Path) -> None:
    """As it stands in configs/local.yaml, but for the directory of the example and its files."""
    config = _resolved(
        "local.yaml", f"nodes.here.cwd={ROOT}", f"nodes.here.mounts.scratch={tmp_path}"
    )
    with launching(tmp_path, config) as launch:
        _assert_echoed(launch)


@needs("sshd")
def test_on_two_ssh_nodes(tmp_path: Path) -> None:
    """The master's address, and where things are on each node, are all that differs."""
    (tmp_path / "scratch").mkdir()
    with sshd.serving(tmp_path / "sshd-a") as a, sshd.serving(tmp_path / "sshd-b") as b:
        settings = ["logs.dir=runs"]
        for name, server in (("a", a), ("b", b)):
            values = {
                "host": "127.0.0.1",
                "python": PYTHON,
                "cwd": str(ROOT),
                "log_dir": str(tmp_path / f"logs-{name}"),
                "mounts.scratch": str(tmp_path / "scratch"),
                "ssh.port": server.port,
                "ssh.config_file": str(server.config_file),
            }
            settings += [f"nodes.{name}.{key}={value}" for key, value in values.items()]
        with launching(tmp_path, _resolved("echo-ssh.yaml", *settings)) as launch:
            _assert_echoed(launch)
    assert list((tmp_path / "logs-b").glob("echo-ssh-*/b/client1/stdout.log"))
    assert not list((tmp_path / "scratch").iterdir())


@needs("slurm")
@pytest.mark.timeout(300)
def test_under_slurm(tmp_path: Path) -> None:
    """Inside an allocation, the config says only where the scratch directory is."""
    (tmp_path / "scratch").mkdir()
    settings = [f"nodes.{name}.mounts.scratch={tmp_path / 'scratch'}" for name in ("n0", "n1")]
    settings += [f"nodes.{name}.cwd={ROOT}" for name in ("n0", "n1")]
    settings += [f"nodes.{name}.log_dir={tmp_path / 'logs'}" for name in ("n0", "n1")]
    config = _resolved("echo-slurm.yaml", *settings)
    config["launch"]["sbatch_options"] = []
    prefix = ("salloc", "--quiet", "--nodes=2")
    with (
        slurmd.serving(tmp_path / "slurm") as slurm,
        launching(tmp_path, config, env=slurm.env, prefix=prefix) as launch,
    ):
        _assert_echoed(launch)
    status = json.loads(next((tmp_path / "runs").glob("*/status.json")).read_text())
    assert sorted(status["nodes"]) == ["n0", "n1"]
