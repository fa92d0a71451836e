"""The store at which the ranks meet before RPC: who hosts it, and how the others find it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed import DistError

from mmrpc.errors import ConfigError, HandshakeError, MmrpcError
from mmrpc.paths.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import TCPStore

    from mmrpc.config import ClusterConfig

_RETRY_S = 0.1
_STORE_S = timedelta(days=1)
_LEAST_S = 1.0
_MARGIN_S = 2.0
_WHERE = "Was it started, and is that where it is? See MASTER_ADDR, or master in the config."


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
    endpoint = _of_url(init_method)
    if endpoint is not None and endpoint.port:
        return endpoint
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if host and port.isdecimal() and int(port):
        return Endpoint(host, int(port), _is_agents())
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


def find_plain_endpoint(init_method: str) -> Endpoint | None:
    """Finds where the ranks of a group without a config meet.

    Args:
        init_method: As torch's options have it.

    Returns:
        The place, or None if it is not at a TCP store that they meet.

    Raises:
        ConfigError: If it is for the environment to say, and it does not.
    """
    if not init_method.startswith("env://"):
        return _of_url(init_method)
    found = {}
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        found[variable] = text = os.environ.get(variable, "")
        if not text or (variable == "MASTER_PORT" and not text.isdecimal()):
            raise ConfigError(
                f"{text!r} is not a port" if text else f"{variable} is not set",
                key=variable,
                hint="Set it for all workers to where rank 0 is, or start them with a launcher.",
            )
    return Endpoint(found["MASTER_ADDR"], int(found["MASTER_PORT"]), _is_agents())


def _of_url(init_method: str) -> Endpoint | None:
    if not init_method.startswith("tcp://"):
        return None
    host, _, port = init_method.removeprefix("tcp://").partition("?")[0].rpartition(":")
    if not (host and port.isdecimal()):
        return None
    return Endpoint(host.strip("[]"), int(port), _is_agents())


def _is_agents() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def host_store(endpoint: Endpoint, timeout_s: float, node: str | None) -> TCPStore:
    """Hosts the store in this process.

    Args:
        endpoint: Where.
        timeout_s: How long it may take until the host's name is known.
        node: Name of this node, for errors.

    Raises:
        HandshakeError: If it cannot listen there, or the master's address is not this host's.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        _retry(partial(_resolve, endpoint), deadline_s)
    except OSError as error:
        if is_out_of_descriptors(error):
            raise out_of_descriptors(0, node) from error
        raise HandshakeError(
            f"rank 0 cannot find the master's host {endpoint.host!r}: {_reason(error)}"
            f" for {timeout_s:g} s",
            rank=0,
            node=node,
            hint=_WHERE,
        ) from error
    try:
        # Several in one process share the port: this one, and that of a process group.
        return _open(endpoint, deadline_s, is_master=True, multi_tenant=True)
    except (DistError, TimeoutError) as error:
        text = str(error)
        if is_out_of_descriptors(error):
            raise out_of_descriptors(0, node) from error
        if "failed to listen" in text:
            is_taken = "EADDRINUSE" in text
            why = ": another program does" if is_taken else f" ({text.partition(chr(10))[0]})"
            raise HandshakeError(
                f"rank 0 cannot listen on port {endpoint.port}{why}",
                rank=0,
                node=node,
                hint="Choose another port for the master. Is another process rank 0 as well?",
            ) from error
        raise HandshakeError(
            f"rank 0 does not reach its store at {endpoint.host}:{endpoint.port}"
            f" ({text.partition(chr(10))[0].rstrip('.')})",
            rank=0,
            node=node,
            hint="The master's address must be one of the host where rank 0 runs.",
        ) from error


def connect_store(endpoint: Endpoint, timeout_s: float, rank: int, node: str | None) -> TCPStore:
    """Connects to the store, waiting until it is there.

    Args:
        endpoint: Where it is.
        timeout_s: How long to wait for it.
        rank: Number of this process, for errors.
        node: Name of this node, for errors.

    Raises:
        HandshakeError: If it is not there in time.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        # torch would wait as well, and print a stack at every refusal.
        _retry(partial(_knock, endpoint, deadline_s), deadline_s)
    except OSError as error:
        if is_out_of_descriptors(error):
            raise out_of_descriptors(rank, node) from error
        why = f"{_reason(error)} for {timeout_s:g} s"
        raise _absent(endpoint, rank, node, why) from error
    try:
        return _open(endpoint, deadline_s, is_master=False)
    except (DistError, TimeoutError) as error:
        if is_out_of_descriptors(error):
            raise out_of_descriptors(rank, node) from error
        why = "what answers there is no store of torch's"
        raise _absent(endpoint, rank, node, why) from error


def is_out_of_descriptors(error: Exception) -> bool:
    """Whether it is that of which torch, or one of its libraries, speaks."""
    return os.strerror(errno.EMFILE).lower() in str(error).lower()


@contextlib.contextmanager
def telling_of_descriptors(rank: int) -> Iterator[None]:
    """Raises `out_of_descriptors` wherever in a rank's beginning there were none left."""
    try:
        yield
    except MmrpcError:
        raise
    except (RuntimeError, OSError) as error:
        if not is_out_of_descriptors(error):
            raise
        raise out_of_descriptors(rank) from error


def out_of_descriptors(rank: int, node: str | None = None) -> HandshakeError:
    """The error of a rank that may not open what it needs to."""
    return HandshakeError(
        f"rank {rank} has too many open files",
        rank=rank,
        node=node,
        hint="Raise the limit of open files (ulimit -n).",
    )


def _open(endpoint: Endpoint, deadline_s: float, **how: bool) -> TCPStore:
    left_s = max(deadline_s - time.monotonic(), _LEAST_S)

    def open_it() -> TCPStore:
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(
            endpoint.host,
            endpoint.port,
            wait_for_workers=False,
            timeout=timedelta(seconds=left_s),
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            **how,
        )
        # From here on each wait has a deadline of its own.
        store.set_timeout(_STORE_S)
        return store

    # torch's own limit does not count once something has accepted the connection.
    return Deadline(left_s + _MARGIN_S).call(open_it)


def _retry(attempt: Callable[[], None], deadline_s: float) -> None:
    while True:
        try:
            attempt()
            return
        except OSError:
            if deadline_s - time.monotonic() <= _RETRY_S:
                raise
        time.sleep(_RETRY_S)


def _resolve(endpoint: Endpoint) -> None:
    socket.getaddrinfo(endpoint.host, endpoint.port)


def _knock(endpoint: Endpoint, deadline_s: float) -> None:
    left_s = max(deadline_s - time.monotonic(), _RETRY_S)
    socket.create_connection((endpoint.host, endpoint.port), timeout=left_s).close()


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or type(error).__name__).lower()


def _absent(endpoint: Endpoint, rank: int, node: str | None, reason: str) -> HandshakeError:
    host = "the master's agent" if endpoint.is_agents else "rank 0"
    return HandshakeError(
        f"rank {rank} cannot reach {host} at {endpoint.host}:{endpoint.port}: {reason}",
        rank=rank if endpoint.is_agents else 0,
        node=node,
        hint=_WHERE,
    )
