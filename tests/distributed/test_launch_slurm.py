"""Launches under a real Slurm of two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import (
    PYTHON,
    agents,
    assert_nobody_left,
    launching,
    one_role,
    run_dir,
    wait_until,
    write_job,
)
from tests.distributed.slurmd import Slurm
from tests.needs import needs

pytestmark = needs("slurm")
SALLOC = ("salloc", "--quiet", "--nodes=2")


def _config(target: str) -> dict[str, Any]:
    return one_role(target, {"a": 1, "b": 2}, launch={"via": "slurm", "grace_s": 5})


def test_nodes_of_an_allocation_take_the_places_of_ours(tmp_path: Path, slurm: Slurm) -> None:
    """A config that names neither host runs on whatever Slurm gives."""
    config = _config("sh -c 'echo $MMRPC_WORKER on $MMRPC_NODE is $SLURMD_NODENAME'")
    with launching(tmp_path, config, env=slurm.env, prefix=SALLOC) as launch:
        assert launch.code() == 0, launch.text
        expected = {
            "w0 | w0 on a is s1",
            "w1 | w1 on b is s2",
            "w2 | w2 on b is s2",
        }
        assert expected <= set(launch.lines)
    assert_nobody_left(tmp_path)


def test_a_node_with_slurms_name_is_that_one(tmp_path: Path, slurm: Slurm) -> None:
    """Names that Slurm knows are not handed out by order."""
    config = one_role("sh -c 'echo on $MMRPC_NODE is $SLURMD_NODENAME'", {"s2": 1, "other": 1})
    config["launch"] = {"via": "slurm"}
    with launching(tmp_path, config, env=slurm.env, prefix=SALLOC) as launch:
        assert launch.code() == 0, launch.text
        assert {"w0    | on s2 is s2", "w1    | on other is s1"} <= set(launch.lines)


def test_a_batch_job_ends_with_the_workers_code(tmp_path: Path, slurm: Slurm) -> None:
    """``--sbatch --submit`` hands in the script that ``--sbatch`` prints."""
    config = _config("job:wait_for_file")
    with launching(tmp_path, config, "--sbatch", env=slurm.env) as printed:
        assert printed.code() == 0
        assert printed.lines[0] == "#!/bin/sh"
        assert "#SBATCH --nodes=2" in printed.lines
    with launching(tmp_path, config, "--sbatch", "--submit", env=slurm.env) as submitted:
        assert submitted.code() == 0, submitted.text
        job = submitted.text.split()[-1]
    (output,) = [tmp_path / f"slurm-{job}.out"]
    wait_until(lambda: output.exists() and "up w2" in output.read_text())
    (tmp_path / "end-w1").write_text("6")
    wait_until(lambda: "JobState=FAILED" in slurm.command("scontrol", "show", "job", job))
    assert "ExitCode=6:0" in slurm.command("scontrol", "show", "job", job)
    assert "worker w1 failed: exit code 6" in output.read_text()
    assert_nobody_left(tmp_path)


def test_a_cancelled_job_leaves_nobody(tmp_path: Path, slurm: Slurm) -> None:
    """``scancel`` ends the workers in order: the launcher hears of it."""
    config = _config("job:hold")
    with launching(tmp_path, config, "--sbatch", "--submit", env=slurm.env) as submitted:
        assert submitted.code() == 0, submitted.text
        job = submitted.text.split()[-1]
    output = tmp_path / f"slurm-{job}.out"
    wait_until(lambda: output.exists() and "up w2" in output.read_text())
    slurm.command("scancel", job)
    assert_nobody_left(tmp_path)
    assert '"state": "failed"' in (run_dir(tmp_path) / "status.json").read_text()


@pytest.mark.parametrize("member", ["launcher", "srun", "agent"])
def test_whoever_is_killed_nobody_is_left(tmp_path: Path, slurm: Slurm, member: str) -> None:
    """SIGKILL of any link ends the workers on both nodes."""
    config = _config("job:hold")
    with launching(tmp_path, config, env=slurm.env, prefix=SALLOC) as launch:
        launch.until("up w0", "up w1", "up w2")
        launcher = _children(launch.process.pid, "launch cluster.json")[0]
        victim = {
            "launcher": launcher,
            "srun": _children(launcher, "srun")[-1],
            "agent": agents(tmp_path)[-1],
        }[member]
        os.kill(victim, signal.SIGKILL)
        assert_nobody_left(tmp_path)
        launch.code()


def _children(parent: int, text: str) -> list[int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True
    ).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if text in line]


def test_an_allocation_that_is_too_small_is_named(tmp_path: Path, slurm: Slurm) -> None:
    """The error says how many nodes to ask for."""
    prefix = ("salloc", "--quiet", "--nodes=1")
    with launching(tmp_path, _config("job:hello"), env=slurm.env, prefix=prefix) as launch:
        assert launch.code() == 1
        assert "the allocation has 1 nodes" in launch.text
        assert "--nodes=2" in launch.text


def test_outside_an_allocation_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    """Nothing is asked of Slurm."""
    write_job(tmp_path, _config("job:hello"))
    done = subprocess.run(
        [PYTHON, "-m", "mmrpc.cli", "launch", "cluster.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1
    assert "not inside a Slurm allocation" in done.stderr
    assert "--sbatch" in done.stderr
