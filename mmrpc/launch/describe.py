"""A run in words, before anything has started: what ``--dry-run`` prints. Pure."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from mmrpc.config.secrets import mask_env
from mmrpc.launch import reach
from mmrpc.launch.plan import WorkerPlan, attempt_env, plan_node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mmrpc.launch.plan import Run


def describe(run: Run, slurm_nodes: dict[str, str] | None = None) -> str:
    """Tells each node's paths, and each worker's command line and environment.

    Values of variables whose names say that they are secret are hidden.

    Raises:
        ConfigError: If a role's target is no target.
    """
    return "\n".join(_lines(run, slurm_nodes or {}))


def _lines(run: Run, slurm_nodes: dict[str, str]) -> Iterator[str]:
    cluster = run.cluster
    yield f"run: {run.name}"
    yield f"config: {cluster.origin.file or 'none'}"
    yield f"launcher logs: {run.directory()}"
    for node in run.nodes():
        config = cluster.nodes[node]
        python = config.python or sys.executable
        by_hand = cluster.launch.via == "manual" and node != cluster.master.node
        agent = (
            reach.by_hand(cluster, node)
            if by_hand
            else shlex.join(reach.command(cluster, node, slurm_nodes))
        )
        yield f"\nnode {node}:"
        yield f"  host: {config.host}"
        yield f"  agent: {agent}"
        yield f"  cwd: {run.cwd_on(node)}"
        yield f"  logs: {run.directory(node)}/{node}"
        if config.cache_dir:
            yield f"  cache_dir: {config.cache_dir}"
        for mount, root in config.mounts.items():
            yield f"  mount {mount} ({cluster.mounts[mount].access}): {root}"
        for plan in plan_node(run, node, python):
            yield from _worker(run, plan)


def _worker(run: Run, plan: WorkerPlan) -> Iterator[str]:
    master = run.cluster.master
    env = {**plan.env, **attempt_env(0, run.cluster.nodes[master.node].host, master.port)}
    yield f"  worker {plan.worker.name}:"
    yield f"    rank: {plan.worker.rank}"
    yield f"    argv: {shlex.join(plan.argv)}"
    yield "    env:"
    for name, value in sorted(mask_env(env).items()):
        chosen = name == "MASTER_PORT" and value == "0"
        yield f"      {name}={'<chosen when the run starts>' if chosen else value}"
