"""The command that starts an agent on a node, by way of this machine, ssh or Slurm. Pure."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmrpc.config import ClusterConfig

AGENT_MODULE = "mmrpc.launch.agent"


def command(
    cluster: ClusterConfig, node: str, slurm_nodes: dict[str, str] | None = None
) -> list[str]:
    """Gives the command line whose standard input and output are the agent's channel.

    Args:
        cluster: The resolved config.
        node: Where the agent shall run.
        slurm_nodes: Slurm's name of each node, for ``via: slurm``.
    """
    agent = [cluster.nodes[node].python or sys.executable, "-m", AGENT_MODULE]
    match cluster.launch.via:
        case "local" | "manual":  # by hand means the other nodes
            return agent
        case "ssh":
            return [*_ssh(cluster, node), shlex.join(agent)]
        case "slurm":
            return [*_srun(cluster, (slurm_nodes or {})[node]), *agent]


def by_hand(cluster: ClusterConfig, node: str) -> str:
    """Gives what a person types on a node that nothing here can reach."""
    config = cluster.nodes[node]
    enter = f"cd {shlex.quote(config.cwd)} && " if config.cwd else ""
    return f"{enter}{config.python or 'python'} -m mmrpc.cli agent CONFIG --node {node}"


def _ssh(cluster: ClusterConfig, node: str) -> list[str]:
    config = cluster.nodes[node]
    ssh, launch = config.ssh, cluster.launch
    words = ["ssh", "-T"]
    if ssh.config_file:
        words += ["-F", ssh.config_file]
    if ssh.port:
        words += ["-p", str(ssh.port)]
    if ssh.user:
        words += ["-l", ssh.user]
    # The first value of an option counts: what the user says wins over what we need.
    for option in (*ssh.options, *launch.ssh_options):
        words += ["-o", option]
    for option in (
        "BatchMode=yes",  # nobody can answer a question
        f"ConnectTimeout={max(1, int(launch.start_timeout_s))}",
        "ServerAliveInterval=5",  # a cut network is noticed
        "ServerAliveCountMax=3",
        "ControlPath=none",  # a shared connection would outlive us, or end with somebody else
    ):
        words += ["-o", option]
    return [*words, "--", ssh.host or config.host]


def _srun(cluster: ClusterConfig, slurm_node: str) -> list[str]:
    return [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={slurm_node}",
        "--overlap",  # the step shares the node with whatever else the job runs there
        "--cpu-bind=none",  # one task is all that Slurm sees; its workers need every core
        "--unbuffered",
        "--quiet",
        *cluster.launch.srun_options,
    ]
