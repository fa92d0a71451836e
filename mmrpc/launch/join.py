"""Agents that are started by hand: they come to the launcher instead of the other way round.

The launcher runs on the master's node and listens at the master's port; each agent says which
node it is and which config it has. As with torch's own store, whoever can reach the port is
trusted; but an agent runs only what its own copy of the config says.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from mmrpc.errors import ConfigError, LaunchError
from mmrpc.launch import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from queue import SimpleQueue

    from mmrpc.config import ClusterConfig

_HELLO_TIMEOUT_S = 10.0
_RETRY_S = 0.2
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent has come.

    Attributes:
        connection: To it; the receiver owns it.
        from_agent: A stream on it, after the first line.
    """

    connection: socket.socket
    from_agent: IO[bytes]


def _notice_dead_peers(connection: socket.socket) -> None:
    """Makes the kernel ask a silent peer whether it is there: its host may have lost power."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Listener:
    """Waits for agents in a thread, until it is closed.

    Args:
        port: Where to listen, on every address.
        nodes: Whose agents may come, once each.
        config_hash: Of the config that they must have.
        events: Where ``(node, Joined)`` goes.

    Raises:
        LaunchError: If the port cannot be had.
    """

    def __init__(
        self,
        port: int,
        nodes: Collection[str],
        config_hash: str,
        events: SimpleQueue[tuple[str, Any]],
    ) -> None:
        self._expected, self._config_hash, self._events = set(nodes), config_hash, events
        try:
            self._socket = socket.create_server(("", port))
        except OSError as error:
            raise LaunchError(
                f"cannot wait for agents on port {port}: {(error.strerror or '').lower()}",
                hint="Choose another master.port.",
                exit_code=1,
            ) from None
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lets nobody in any more."""
        # Closing alone does not wake a thread that waits in accept().
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                connection.settimeout(_HELLO_TIMEOUT_S)
                self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        from_agent = connection.makefile("rb")
        hello = messages.decode(from_agent.readline(1 << 16))
        if refusal := self._refusal(hello):
            with connection, from_agent:
                connection.sendall(messages.encode(messages.Refused(refusal)))
            return
        connection.settimeout(None)
        _notice_dead_peers(connection)
        self._expected.discard(hello.node)
        self._events.put((hello.node, Joined(connection, from_agent)))

    def _refusal(self, hello: Any) -> str | None:
        if not isinstance(hello, messages.Hello):
            return "this is no agent"
        if hello.node not in self._expected:
            return f"no agent of {hello.node!r} is awaited: none runs there, or it is here already"
        if hello.config_hash != self._config_hash:
            return "the launcher has another config; give every node the same"
        return None


def require_port(cluster: ClusterConfig) -> None:
    """Refuses a config whose agents could not find the launcher.

    Raises:
        ConfigError: If the master's port is any free one.
    """
    if cluster.master.port == 0:
        raise ConfigError(
            "agents that are started by hand cannot know which port 0 has become",
            key="master.port",
            hint="Choose one.",
        )


def serve(cluster: ClusterConfig, node: str) -> int:
    """Runs the agent of this node until the launcher ends it; gives the exit code.

    Raises:
        ConfigError: If there is no port at which to look for the launcher.
        LaunchError: If the launcher is not found, or does not take us.
    """
    require_port(cluster)
    from mmrpc.config import config_hash
    from mmrpc.launch.agent import LOST, Agent

    hello = messages.Hello(node, config_hash(cluster))
    host = cluster.nodes[cluster.master.node].host
    timeout_s = cluster.launch.start_timeout_s
    with connect(host, cluster.master.port, hello, timeout_s) as connection:
        code = Agent(connection.fileno(), connection.fileno(), cluster).run()
    if code == LOST:
        raise LaunchError("the launcher is gone", node=node, exit_code=code)
    return code


def connect(
    host: str,
    port: int,
    hello: messages.Hello,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> socket.socket:
    """Connects to the launcher, which may be started later, and says who we are.

    Raises:
        LaunchError: If nobody listens there in time.
    """
    deadline = clock() + timeout_s
    while True:
        try:
            connection = socket.create_connection((host, port), max(0.1, deadline - clock()))
            break
        except OSError as error:
            if clock() >= deadline:
                raise LaunchError(
                    f"no launcher at {host}:{port} within {timeout_s:g} s: "
                    f"{(error.strerror or str(error)).lower()}",
                    hint="Start `mmrpc launch` on the master's node.",
                    exit_code=1,
                ) from None
            time.sleep(_RETRY_S)
    connection.settimeout(None)
    _notice_dead_peers(connection)
    connection.sendall(messages.encode(hello))
    return connection
