"""Slurm: which of its nodes is which of ours, and the batch script that gets an allocation."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

from mmrpc.errors import LaunchError
from mmrpc.launch import plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mmrpc.config import ClusterConfig

_OPEN = "127.0.0.1"
"""The host of a node whose config names none: no address for a job of several nodes."""


def place(cluster: ClusterConfig) -> tuple[ClusterConfig, dict[str, str]]:
    """Finds each node's place in the allocation that this process is in.

    A node that has the name or the host of one of Slurm's is that one. The others take what is
    left in order; a config for Slurm need not know where it will run.

    Returns:
        The config with the hosts that were open filled in, and Slurm's name of each node.

    Raises:
        LaunchError: If there is no allocation, or it has too few nodes.
    """
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    if nodelist is None:
        raise LaunchError(
            "this is not inside a Slurm allocation",
            hint="Use salloc or sbatch; `mmrpc launch CONFIG --sbatch` prints a script.",
            exit_code=1,
        )
    names = _scontrol("show", "hostnames", nodelist).split()
    nodes = _scontrol("--oneliner", "show", "node", nodelist).splitlines()
    return assign(cluster, names, dict(map(_address, nodes)))


def _scontrol(*words: str) -> str:
    command = ["scontrol", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"cannot ask scontrol for the allocation's nodes: {error}") from None
    return done.stdout


def _address(line: str) -> tuple[str, str]:
    """Name and address of a node, from a line of ``key=value``."""
    values = dict(word.partition("=")[::2] for word in line.split())
    return values["NodeName"], values.get("NodeAddr", values["NodeName"])


def assign(
    cluster: ClusterConfig, names: list[str], addresses: Mapping[str, str]
) -> tuple[ClusterConfig, dict[str, str]]:
    """Assigns Slurm's nodes, and the addresses that they have, to ours; see `place`."""
    busy = plan.busy_nodes(cluster)
    placed: dict[str, str] = {}
    for node in busy:
        for known in (node, cluster.nodes[node].host):
            if known in names and known not in placed.values():
                placed.setdefault(node, known)
    free = [name for name in names if name not in placed.values()]
    missing = [node for node in busy if node not in placed]
    if len(free) < len(missing):
        raise LaunchError(
            f"the allocation has {len(names)} nodes ({', '.join(names)}), and the config needs "
            f"{len(busy)}",
            hint=f"Ask Slurm for --nodes={len(busy)}.",
            exit_code=1,
        )
    placed.update(zip(missing, free, strict=False))
    nodes = {
        node: config
        if node not in placed or config.host != _OPEN
        else config.model_copy(update={"host": addresses.get(placed[node], placed[node])})
        for node, config in cluster.nodes.items()
    }
    return cluster.model_copy(update={"nodes": nodes}), placed


def script(cluster: ClusterConfig, words: list[str], cwd: str) -> str:
    """Writes a batch script that launches the cluster inside an allocation of its own.

    Args:
        cluster: The resolved config.
        words: Arguments of ``mmrpc launch``.
        cwd: Where it shall run.
    """
    busy = plan.busy_nodes(cluster)
    most = max(len(cluster.workers_on(node)) for node in busy)
    options = [
        f"--job-name={cluster.name}",
        f"--nodes={len(busy)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={most}",
        f"--chdir={cwd}",
        # The launcher ends its workers in order, and needs the time that they are given.
        f"--signal=B:TERM@{int(cluster.launch.grace_s) + 20}",
        *cluster.launch.sbatch_options,
    ]
    command = shlex.join([sys.executable, "-m", "mmrpc.cli", "launch", *words])
    lines = ["#!/bin/sh", *(f"#SBATCH {option}" for option in options), f"exec {command}"]
    return "\n".join(lines) + "\n"


def submit(text: str) -> str:
    """Hands a batch script to ``sbatch`` and gives what it says.

    Raises:
        LaunchError: If it is refused.
    """
    try:
        done = subprocess.run(
            ["sbatch"], input=text, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"cannot run sbatch: {error}") from None
    if done.returncode:
        raise LaunchError(f"sbatch refused the job: {done.stderr.strip()}", exit_code=1)
    return done.stdout.strip()
