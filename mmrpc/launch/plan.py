"""What each worker of a run will be given: command line, environment, log directory. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmrpc.launch import sweep, target
from mmrpc.launch.columns import aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmrpc.config import ClusterConfig, Worker

CLUSTER_FILE = "cluster.json"
"""Name of the resolved config beside the logs."""


def busy_nodes(cluster: ClusterConfig) -> list[str]:
    """The master's node, whose agent hosts the store, then the others that run workers."""
    master = cluster.master.node
    busy = {worker.node for worker in cluster.workers()}
    return [master, *(node for node in cluster.nodes if node in busy - {master})]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a cluster, before anything has started.

    Attributes:
        cluster: The resolved config.
        run_id: What no other run is called.
        name: Name of the run's directory in the log directory.
        arguments: What stood after ``--``.
        cwd: Working directory of the launcher, the default of its nodes.
    """

    cluster: ClusterConfig
    run_id: str
    name: str
    arguments: tuple[str, ...]
    cwd: str

    def cwd_on(self, node: str) -> str:
        """Working directory of a node's workers."""
        return self.cluster.nodes[node].cwd or self.cwd

    def directory(self, node: str | None = None) -> str:
        """The run's directory on a node, or on the launcher's."""
        base = self.cluster.logs.dir
        if node is None or self.cluster.launch.via == "local":
            base = os.path.join(self.cwd, base)
        else:
            base = os.path.join(self.cwd_on(node), base)
        if node is not None:
            base = self.cluster.nodes[node].log_dir or base
        return os.path.join(base, self.name)

    def nodes(self) -> list[str]:
        """Nodes that need an agent; see `busy_nodes`."""
        return busy_nodes(self.cluster)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker, before it has started.

    Attributes:
        worker: Its name and place.
        argv: Its command line.
        env: What is added to the agent's environment, but for what `attempt_env` adds.
        directory: Where its logs go, on its node.
        shown: Whether its output is shown on the console as well.
    """

    worker: Worker
    argv: tuple[str, ...]
    env: dict[str, str]
    directory: str
    shown: bool


def plan_node(run: Run, node: str, python: str) -> list[WorkerPlan]:
    """Plans the workers of one node, in order of local rank.

    Raises:
        ConfigError: If a role's target is no target.
    """
    cluster, directory = run.cluster, run.directory(node)
    config, workers = cluster.nodes[node], cluster.workers_on(node)
    world_size = len(cluster.workers())
    plans = []
    for worker in workers:
        role = cluster.roles[worker.role]
        env = {
            "PYTHONUNBUFFERED": "1",  # else a log ends long before its worker does
            **_interface(config.interface),
            **config.env,
            **role.env,
            **sweep.mark(run.run_id, node),
            "MMRPC_WORKER": worker.name,
            "MMRPC_ROLE": worker.role,
            "MMRPC_CLUSTER": os.path.join(directory, node, CLUSTER_FILE),
            "MMRPC_RUN_DIR": directory,
            "RANK": str(worker.rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(worker.local_rank),
            "LOCAL_WORLD_SIZE": str(len(workers)),
            "TORCHELASTIC_RUN_ID": run.run_id,
            "TORCHELASTIC_MAX_RESTARTS": str(cluster.launch.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        argv = target.parse(role.target).argv(python, [*role.args, *run.arguments])
        shown = is_shown(worker.name, cluster)
        logs = os.path.join(directory, node, worker.name)
        plans.append(WorkerPlan(worker, tuple(argv), env, logs, shown))
    return plans


def is_shown(worker: str, cluster: ClusterConfig) -> bool:
    """Whether a worker's output is shown on the launcher's console."""
    return not {"all", worker}.isdisjoint(cluster.logs.tee)


def attempt_env(attempt: int, master_addr: str, master_port: int) -> dict[str, str]:
    """What a worker's environment says that is known only when the gang starts."""
    return {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "MMRPC_RESTARTS": str(attempt),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


def _interface(name: str | None) -> dict[str, str]:
    return {"TP_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name} if name else {}


def table(workers: Sequence[Worker], cluster: ClusterConfig) -> str:
    """Ranks, names, nodes and targets, as lines of columns."""
    rows = [("RANK", "WORKER", "NODE", "TARGET")]
    rows += [(str(w.rank), w.name, w.node, cluster.roles[w.role].target) for w in workers]
    return "\n".join(aligned(rows))
