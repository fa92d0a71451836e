"""Slurm's nodes take the places of ours; the batch script asks for what the config needs."""

from __future__ import annotations

from typing import Any

import pytest

from mmrpc.config import ClusterConfig, parse_config
from mmrpc.errors import LaunchError
from mmrpc.launch import slurm


def _cluster(nodes: dict[str, Any], **more: Any) -> ClusterConfig:
    workers = {name: number for number, name in enumerate(nodes, start=1)}
    return parse_config(
        {
            "name": "demo",
            "nodes": nodes,
            "roles": {"w": {"target": "job:main", "workers": workers}},
            "launch": {"via": "slurm", "grace_s": 15, "sbatch_options": ["--time=1:00"]},
            **more,
        }
    )


def test_by_name_then_by_host_then_in_order() -> None:
    """What the config leaves open, the allocation says."""
    cluster = _cluster({"x": {}, "n2": {}, "y": {"host": "n3"}, "z": {}})
    resolved, placed = slurm.assign(
        cluster, ["n1", "n2", "n3", "n4"], {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    )
    assert placed == {"x": "n1", "n2": "n2", "y": "n3", "z": "n4"}
    hosts = {name: node.host for name, node in resolved.nodes.items()}
    assert hosts == {"x": "10.0.0.1", "n2": "10.0.0.2", "y": "n3", "z": "n4"}


def test_a_given_host_is_kept() -> None:
    """It may be another network's address than Slurm's."""
    resolved, placed = slurm.assign(_cluster({"n1": {"host": "10.9.9.9"}}), ["n1"], {"n1": "x"})
    assert (resolved.nodes["n1"].host, placed) == ("10.9.9.9", {"n1": "n1"})


def test_idle_nodes_need_no_place() -> None:
    """But the master does, also if no worker runs on it."""
    cluster = _cluster(
        {"a": {}, "idle": {}, "head": {}},
        roles={"w": {"target": "job:main", "workers": {"a": 1}}},
        master={"node": "head"},
    )
    _, placed = slurm.assign(cluster, ["n1", "n2"], {})
    assert placed == {"head": "n1", "a": "n2"}


def test_too_few_nodes_is_an_error() -> None:
    """It says how many to ask for."""
    with pytest.raises(LaunchError, match=r"has 1 nodes .n1., and the config needs 2") as caught:
        slurm.assign(_cluster({"a": {}, "b": {}}), ["n1"], {})
    assert caught.value.hint == "Ask Slurm for --nodes=2."


def test_a_script_asks_for_the_nodes_and_the_most_workers() -> None:
    """Its last line becomes the launcher, so that Slurm's signals reach it."""
    cluster = _cluster({"a": {}, "b": {}})
    lines = slurm.script(cluster, ["/my config.yaml", "--", "--lr"], "/srv").splitlines()
    assert lines[0] == "#!/bin/sh"
    options = [line.removeprefix("#SBATCH ") for line in lines[1:-1]]
    assert options == [
        "--job-name=demo",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
        "--chdir=/srv",
        "--signal=B:TERM@35",
        "--time=1:00",
    ]
    assert lines[-1].startswith("exec ")
    assert lines[-1].endswith("mmrpc.cli launch '/my config.yaml' -- --lr")
