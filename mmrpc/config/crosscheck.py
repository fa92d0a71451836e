"""Checks across the parts of a cluster config that no single part can make."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mmrpc.config.cluster import ClusterConfig

_MOST_NAMES = 12

Problem = tuple[tuple[str, ...], str]
"""The key that it is about, and what is wrong with it."""


def find_problems(cluster: ClusterConfig) -> list[Problem]:
    """Finds everything that does not fit together, in the order of the file's parts."""
    return [
        *_check_names(cluster),
        *_check_master(cluster),
        *_check_roles(cluster),
        *_check_mounts(cluster),
        *_check_deadlines(cluster),
        *_check_tee(cluster),
    ]


def unknown(kind: str, name: str, valid: Iterable[str]) -> str:
    """Says that a name is not one of the valid ones, and which was probably meant."""
    names = list(valid)
    return f"there is no {kind} {name!r} (known: {listed(names)}){nearest(name, names)}"


def nearest(name: str, valid: list[str]) -> str:
    """Asks whether the valid name that is most like another one was meant, if one is."""
    near = difflib.get_close_matches(name, valid, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def listed(names: list[str]) -> str:
    """Lists names for an error, and not a thousand of them."""
    shown = ", ".join(names[:_MOST_NAMES]) or "none"
    return f"{shown}, ... ({len(names)} in all)" if len(names) > _MOST_NAMES else shown


def _check_names(cluster: ClusterConfig) -> Iterator[Problem]:
    for part, names in (
        ("nodes", cluster.nodes),
        ("mounts", cluster.mounts),
        ("roles", cluster.roles),
    ):
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", name):
                yield (part, name), "a name may hold letters, digits, '_' and '-' only"
    for name, node in cluster.nodes.items():
        for key in node.env:
            if not key or "=" in key or "\0" in key:
                yield ("nodes", name, "env", key), "this is not the name of a variable"


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
