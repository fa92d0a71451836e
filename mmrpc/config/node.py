"""Which node of a cluster this process is on: never in the shared file, always found here."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from mmrpc.config.wording import listed, unknown
from mmrpc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mmrpc.config.cluster import ClusterConfig

_HOW = "Say it with --node NAME, or MMRPC_NODE in the environment."


def resolve_node(
    cluster: ClusterConfig,
    explicit: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Finds the name of the node that this process is on.

    In this order: `explicit`, ``MMRPC_NODE``, Slurm's environment, and the one node whose host
    is this machine's name or one of its addresses.

    Args:
        cluster: The config.
        explicit: The name, if it was given.
        environ: The environment to look into.

    Raises:
        ConfigError: If the name is not in the config, or no node or several could be meant.
    """
    for name, source in ((explicit, "--node"), (environ.get("MMRPC_NODE"), "MMRPC_NODE")):
        if name:
            if name not in cluster.nodes:
                raise ConfigError(unknown("node", name, cluster.nodes), key=source)
            return name
    slurm = _from_slurm(cluster, environ)
    if slurm is not None:
        return slurm
    return _from_host(cluster)


def _from_slurm(cluster: ClusterConfig, environ: Mapping[str, str]) -> str | None:
    name = environ.get("SLURMD_NODENAME")
    if name:
        matches = [
            node
            for node, config in cluster.nodes.items()
            if name in (node, config.host) or name.split(".")[0] == config.host.split(".")[0]
        ]
        if len(matches) == 1:
            return matches[0]
    index = environ.get("SLURM_NODEID", "")
    # Names that Slurm does not know stand for the nodes of the allocation, in order.
    if cluster.launch.via != "slurm" or not index.isdigit():
        return None
    if int(index) >= len(cluster.nodes):
        raise ConfigError(
            f"Slurm calls this node number {index}, and the config has {len(cluster.nodes)} nodes",
            key="nodes",
            hint="Allocate as many nodes as the config has.",
        )
    return list(cluster.nodes)[int(index)]


def _from_host(cluster: ClusterConfig) -> str:
    own = {socket.gethostname(), socket.getfqdn()}
    own |= {name.split(".")[0] for name in own} | {"localhost"}
    matches = [
        name
        for name, config in cluster.nodes.items()
        if config.host in own or (_is_address(config.host) and _is_local(config.host))
    ]
    if not matches:
        # Last, since asking for a name can take a while where there is no name server.
        matches = [
            name
            for name, config in cluster.nodes.items()
            if not _is_address(config.host) and any(map(_is_local, _addresses(config.host)))
        ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(
            f"this host could be any of the nodes {listed(matches)}", key="nodes", hint=_HOW
        )
    hosts = listed([f"{name} ({config.host})" for name, config in cluster.nodes.items()])
    raise ConfigError(
        f"this host, {socket.gethostname()!r}, is none of the nodes {hosts}", key="nodes", hint=_HOW
    )


def _is_address(host: str) -> bool:
    import ipaddress

    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _is_local(address: str) -> bool:
    """Whether an address belongs to this host: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
