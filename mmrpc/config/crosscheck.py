"""Checks across the parts of a cluster config that no single part can make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmrpc.config.wording import unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mmrpc.config.cluster import ClusterConfig

Problem = tuple[tuple[str, ...], str]
"""The key that it is about, and what is wrong with it."""


def find_problems(cluster: ClusterConfig) -> list[Problem]:
    """Finds everything that does not fit together, in the order of the file's parts."""
    return [
        *_check_master(cluster),
        *_check_roles(cluster),
        *_check_mounts(cluster),
        *_check_deadlines(cluster),
        *_check_tee(cluster),
    ]


def _check_master(cluster: ClusterConfig) -> Iterator[Problem]:
    master = cluster.master
    if master.node not in cluster.nodes:
        yield ("master", "node"), unknown("node", master.node, cluster.nodes)
    elif cluster.launch.via == "manual" and cluster.roles and not _workers_on(cluster, master.node):
        # A launcher's agent would host the rendezvous; without one, rank 0 does.
        yield ("master", "node"), f"no worker runs on {master.node!r}, and rank 0 must"
    if master.port == 0 and cluster.launch.via == "manual" and not cluster.is_one_host():
        yield (
            ("master", "port"),
            "port 0 (any free one) needs all nodes on one host, or a launcher that tells the "
            "other nodes which one it was; with launch.via: manual, choose a port",
        )


def _workers_on(cluster: ClusterConfig, node: str) -> int:
    return sum(role.workers.get(node, 0) for role in cluster.roles.values())


def _check_roles(cluster: ClusterConfig) -> Iterator[Problem]:
    for name, role in cluster.roles.items():
        for node in role.workers:
            if node not in cluster.nodes:
                yield ("roles", name, "workers", node), unknown("node", node, cluster.nodes)
        if not any(role.workers.values()):
            yield ("roles", name, "workers"), "this role has no worker on any node"
    seen: dict[str, str] = {}
    for worker in cluster.workers():
        # ps1 + 0 and ps + 10 are both ps10.
        other = seen.setdefault(worker.name, worker.role)
        if other != worker.role:
            yield ("roles", worker.role), f"it and role {other!r} both have a worker {worker.name}"


def _check_mounts(cluster: ClusterConfig) -> Iterator[Problem]:
    for name, node in cluster.nodes.items():
        for mount in node.mounts:
            if mount not in cluster.mounts:
                yield ("nodes", name, "mounts", mount), unknown("mount", mount, cluster.mounts)
        for mount in cluster.mounts:
            if mount not in node.mounts and (_workers_on(cluster, name) or not cluster.roles):
                yield (
                    ("nodes", name, "mounts"),
                    f"node {name!r} runs workers but does not say where mount {mount!r} is",
                )


def _check_deadlines(cluster: ClusterConfig) -> Iterator[Problem]:
    rpc = cluster.rpc
    for key in ("mount_timeout_s", "visibility_timeout_s"):
        value = getattr(rpc, key)
        if value >= rpc.handshake_timeout_s:
            yield (
                ("rpc", key),
                f"{value:g} s does not fit in handshake_timeout_s, {rpc.handshake_timeout_s:g} s",
            )


def _check_tee(cluster: ClusterConfig) -> Iterator[Problem]:
    if not cluster.roles:
        return
    names = ["all", *(worker.name for worker in cluster.workers())]
    for index, name in enumerate(cluster.logs.tee):
        if name not in names:
            yield ("logs", "tee", str(index)), unknown("worker", name, names)
