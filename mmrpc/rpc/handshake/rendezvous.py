"""The store at which the ranks meet before RPC: who hosts it, and how the others find it."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from mmrpc.errors import ConfigError, HandshakeError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from mmrpc.config import ClusterConfig

_RETRY_S = 0.1
_STORE_S = timedelta(days=1)
_CONNECT_S = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the store is.

    Attributes:
        host: Name or address of the master.
        port: Its TCP port; 0 if this process is to choose one.
        is_agents: Whether a launcher's agent hosts it, and not rank 0.
    """

    host: str
    port: int
    is_agents: bool = False

    @property
    def init_method(self) -> str:
        """The same as torch writes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def find_endpoint(cluster: ClusterConfig, world_size: int, init_method: str = "") -> Endpoint:
    """Finds where the ranks meet: said in the call, by a launcher, or by the config.

    Args:
        cluster: The config.
        world_size: How many ranks there are.
        init_method: What the caller chose; only ``tcp://host:port`` says anything.

    Raises:
        ConfigError: If nobody says which port.
    """
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if init_method.startswith("tcp://"):
        host, _, port = init_method.removeprefix("tcp://").partition("?")[0].rpartition(":")
        if port.isdecimal() and int(port):
            return Endpoint(host.strip("[]"), int(port), agents)
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if host and port.isdecimal() and int(port):
        return Endpoint(host, int(port), agents)
    master = cluster.master
    if master.port == 0 and world_size > 1:
        place = cluster.origin.find("master.port")
        raise ConfigError(
            "it is 0, which is any free port, and no launcher has told which one that is",
            key="master.port",
            file=place.file if place else None,
            line=place.line if place else None,
            column=place.column if place else None,
            hint="Start the workers with 'mmrpc launch', or choose a port.",
        )
    return Endpoint(cluster.nodes[master.node].host, master.port)


def host_store(endpoint: Endpoint, node: str) -> TCPStore:
    """Hosts the store in this process.

    Raises:
        HandshakeError: If it cannot listen there.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    try:
        # Several in one process share the port: this one, and later RPC's own.
        store = TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=_CONNECT_S,
        )
    except DistNetworkError as error:
        in_use = "EADDRINUSE" in str(error)
        raise HandshakeError(
            f"rank 0 cannot listen on port {endpoint.port}"
            + (": another program does" if in_use else f" ({str(error).splitlines()[0]})"),
            rank=0,
            node=node,
            hint="Choose another master.port, or 0 with a launcher.",
        ) from error
    store.set_timeout(_STORE_S)
    return store


def connect_store(endpoint: Endpoint, timeout_s: float, rank: int, node: str) -> TCPStore:
    """Connects to the store, waiting until it is there.

    Raises:
        HandshakeError: If it is not there in time.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    _wait_until_up(endpoint, timeout_s, rank, node)
    try:
        store = TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=False,
            wait_for_workers=False,
            timeout=_CONNECT_S,
        )
    except DistError as error:
        raise _absent(endpoint, rank, node, str(error).splitlines()[0]) from error
    # From here on each wait has a deadline of its own.
    store.set_timeout(_STORE_S)
    return store


def _wait_until_up(endpoint: Endpoint, timeout_s: float, rank: int, node: str) -> None:
    # torch would wait as well, and print a stack at every refusal.
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            place = (endpoint.host, endpoint.port)
            with socket.create_connection(place, timeout=max(left_s, _RETRY_S)):
                return
        except OSError as error:
            if deadline - time.monotonic() <= _RETRY_S:
                reason = (error.strerror or str(error) or type(error).__name__).lower()
                raise _absent(endpoint, rank, node, f"{reason} for {timeout_s:g} s") from error
        time.sleep(_RETRY_S)


def _absent(endpoint: Endpoint, rank: int, node: str, reason: str) -> HandshakeError:
    host = "the master's agent" if endpoint.is_agents else "rank 0"
    return HandshakeError(
        f"rank {rank} cannot reach {host} at {endpoint.host}:{endpoint.port}: {reason}",
        rank=rank if endpoint.is_agents else 0,
        node=node,
        hint="Was it started, and is master.node the right one?",
    )
