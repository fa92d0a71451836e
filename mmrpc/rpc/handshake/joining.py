"""What nodes prove to each other before any RPC agent exists, which could only hang.

Every rank says who it is. The first rank of each node looks at the node's mounts; one node per
mount leaves a file there that the others read. One rank hears all and gives one verdict, and
every rank returns with it or raises the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed import DistError
from torch.version import __version__ as torch_version

from mmrpc.config import ClusterConfig, config_hash, load_config, resolve_node
from mmrpc.core.system.host import host_id
from mmrpc.errors import ConfigError, HandshakeError
from mmrpc.paths.proof import Proof as MountProof
from mmrpc.rpc import rendezvous
from mmrpc.rpc.handshake import judge, network
from mmrpc.rpc.handshake.board import Board
from mmrpc.rpc.handshake.coordinator import Coordinator
from mmrpc.rpc.handshake.messages import Expired, Hello, Verdict
from mmrpc.rpc.handshake.report import PathReport, Problem
from mmrpc.rpc.handshake.tasks import NodeTasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import TCPStore

    from mmrpc.core.resolver import Resolver

_MARGIN_S = 5.0
"""How much longer a rank waits than the coordinator does, so that it hears the verdict."""
_READ_S = 10.0
"""How long the store stays for those who have not yet read the verdict."""
_FAREWELL_S = 1.0
"""How long a rank that does not know its node tries to tell the others."""

_generation = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """What a handshake leaves for RPC.

    Attributes:
        cluster: The config.
        node: Name of this node.
        init_method: Where RPC's ranks meet, for its options.
        verdict: What was decided.
        report: All that is known, on the rank that coordinated; None on the others.
        store: Where the ranks met.
    """

    cluster: ClusterConfig
    node: str
    init_method: str
    verdict: Verdict
    report: PathReport | None
    store: TCPStore

    def proofs(self) -> dict[str, MountProof]:
        """What was proven of each mount, for the resolver; mounts of one host are left out."""
        return {
            proven.mount: MountProof(
                proven.mount, proven.proof, proven.inode_comparable, proven.generation_comparable
            )
            for proven in self.verdict.proven
            if proven.proof != "one-host"
        }


def join(
    cluster: ClusterConfig | str | os.PathLike[str],
    node: str | None,
    worker: str,
    rank: int,
    world_size: int,
    init_method: str = "",
) -> Joined:
    """Meets the other ranks, and returns once every node has proven what the config asks for.

    Args:
        cluster: The config, or the path of its file.
        node: Name of this node, if the caller knows it.
        worker: Name of this process in RPC.
        rank: Its number.
        world_size: How many there are.
        init_method: Where to meet, if the caller chose it.

    Raises:
        ConfigError: If the config is wrong, or does not tell which node this is or where to meet.
        HandshakeError: The same on every rank, naming rank, node, mount and path.
    """
    joined = survey(cluster, node, worker, rank, world_size, init_method)
    raise_for(joined.verdict)
    return joined


def survey(
    cluster: ClusterConfig | str | os.PathLike[str],
    node: str | None,
    worker: str,
    rank: int,
    world_size: int,
    init_method: str = "",
) -> Joined:
    """Like `join`, but returns also where the verdict is that something is wrong.

    Raises:
        ConfigError: As `join`.
        HandshakeError: If there is no verdict.
    """
    global _generation
    if not isinstance(cluster, ClusterConfig):
        cluster = load_config(cluster)
    endpoint = rendezvous.find_endpoint(cluster, world_size, init_method)
    # Each group of one run meets under keys of its own, also in a store that outlives it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"mmrpc/handshake/{attempt}.{_generation}/"
    _generation += 1
    timeout_s = cluster.rpc.handshake_timeout_s
    unknown: ConfigError | None = None
    try:
        name = resolve_node(cluster, node)
        network.use_interface(cluster.nodes[name].interface, cluster.nodes[name].host)
    except ConfigError as error:
        name, unknown = "", error
        timeout_s = min(timeout_s, _FAREWELL_S)
    hello = introduce(cluster, name, worker, rank, world_size, unknown)
    hosted = None
    try:
        if rank == 0 and not endpoint.is_agents:
            hosted = rendezvous.host_store(endpoint, timeout_s, name)
            endpoint = rendezvous.Endpoint(endpoint.host, hosted.port)
        store = hosted or rendezvous.connect_store(endpoint, timeout_s, rank, name)
    except HandshakeError:
        if unknown is not None:
            raise unknown from None
        raise
    try:
        coordinator = None
        if rank == 0:
            # Each thread needs a connection of its own, since a call blocks the others on it.
            again = partial(_connect_again, endpoint, hosted, timeout_s, prefix, name)
            coordinator = Coordination(cluster, hello, world_size, again)
            coordinator.start()
        board = Board(store, prefix)
        verdict = take_part(board, hello, NodeTasks(cluster, name))
        if coordinator is not None:
            coordinator.join()
            if hosted is not None:
                board.wait_until_read(_READ_S)
    except DistError as error:
        raise HandshakeError(
            f"rank {rank} lost the rendezvous at {endpoint.host}:{endpoint.port}",
            rank=0,
            node=name or None,
            hint="Look at the log of rank 0.",
        ) from error
    report = coordinator.report if coordinator is not None else None
    return Joined(cluster, name, endpoint.init_method, verdict, report, store)


def _connect_again(
    endpoint: rendezvous.Endpoint,
    hosted: TCPStore | None,
    timeout_s: float,
    prefix: str,
    node: str,
) -> Board:
    if hosted is not None:
        # Whatever the config calls this host, the store is in this process.
        endpoint = rendezvous.Endpoint("localhost", hosted.port)
    return Board(rendezvous.connect_store(endpoint, timeout_s, 0, node), prefix)


def introduce(
    cluster: ClusterConfig,
    node: str,
    worker: str,
    rank: int,
    world_size: int,
    unknown: ConfigError | None = None,
) -> Hello:
    """Says who this process is."""
    problem = None
    if unknown is not None:
        problem = Problem(reason=str(unknown).removesuffix("."), rank=rank)
    return Hello(
        rank=rank,
        worker=worker,
        node=node,
        host=host_id(),
        network=network.network_id(),
        pid=os.getpid(),
        address=network.advertised_address(),
        world_size=world_size,
        config=config_hash(cluster),
        sections=_section_hashes(cluster),
        mmrpc=judge.own_version(),
        torch=str(torch_version),
        python=platform.python_version(),
        problem=problem,
    )


def _section_hashes(cluster: ClusterConfig) -> dict[str, str]:
    sections = cluster.model_dump(mode="json")
    return {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
        for name, value in sections.items()
    }


def take_part(board: Board, hello: Hello, tasks: NodeTasks) -> Verdict:
    """Does what the coordinator asks of one rank, until the verdict.

    Raises:
        HandshakeError: If there is no word from the coordinator.
    """
    timeout_s = tasks.cluster.rpc.handshake_timeout_s + _MARGIN_S
    deadline = time.monotonic() + timeout_s
    board.post(hello)
    try:
        while True:
            message = board.hear(hello.rank, max(deadline - time.monotonic(), 0.001))
            if isinstance(message, Verdict):
                tasks.close()  # first, so that nothing is left once all have read it
                board.acknowledge(message.present)
                return message
            board.post(tasks.do(message, hello.rank))
            tasks.after()
    except TimeoutError as error:
        raise HandshakeError(
            f"rank 0 gave rank {hello.rank} no verdict within {timeout_s:g} s",
            rank=0,
            hint="Was rank 0 started? Look at its log.",
        ) from error
    finally:
        tasks.close()


class Coordination:
    """The coordinator at work in a thread of rank 0.

    Args:
        cluster: The config.
        hello: Who rank 0 is.
        world_size: How many ranks there should be.
        connect: Makes a board that no other thread uses.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        hello: Hello,
        world_size: int,
        connect: Callable[[], Board],
    ) -> None:
        self._coordinator = Coordinator(cluster, hello.config, hello.sections, world_size)
        self._connect = connect
        self._board = connect()
        self._thread = threading.Thread(target=self._run, name="mmrpc-handshake", daemon=True)
        self._timer = threading.Timer(cluster.rpc.handshake_timeout_s, self._expire)
        self._timer.daemon = True
        self._error: Exception | None = None

    @property
    def report(self) -> PathReport:
        """All that is known once it has ended."""
        return self._coordinator.report

    def start(self) -> None:
        """Begins to hear."""
        self._timer.start()
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of the thread, which has given its verdict."""
        self._thread.join()
        self._timer.cancel()
        self._timer.join()
        if isinstance(self._error, DistError):
            raise self._error

    def _run(self) -> None:
        try:
            while self._coordinator.verdict is None:
                for rank, message in self._coordinator.receive(self._board.take()):
                    self._board.tell(rank, message)
        except Exception as error:
            self._error = error
            # Whoever waits shall hear of it now, and not at the deadline.
            first_line = str(error).partition("\n")[0]
            reason = f"the coordinator failed ({type(error).__name__}: {first_line})"
            with contextlib.suppress(DistError):
                for rank, message in self._coordinator.fail(reason):
                    self._board.tell(rank, message)

    def _expire(self) -> None:
        with contextlib.suppress(DistError, HandshakeError):  # the store is gone with who waited
            self._connect().post(Expired())


def raise_for(verdict: Verdict) -> None:
    """Raises the error that a verdict stands for, if it does.

    Raises:
        HandshakeError: With the first problem as its own, and the others as notes.
    """
    if not verdict.problems:
        return
    first, *others = verdict.problems
    error = HandshakeError(
        first.clause(),
        node=first.node,
        hint=first.hint,
        rank=first.rank,
        mount=first.mount,
        path=first.path,
        problems=tuple(problem.sentence() for problem in verdict.problems),
    )
    for problem in others:
        error.add_note(f"also {problem.sentence()}")
    untold = verdict.problem_count - len(verdict.problems)
    if untold:
        error.add_note(f"and {untold} more")
    raise error


def make_resolver(joined: Joined) -> Resolver:
    """Builds the resolver that a handshake has paid for."""
    from mmrpc.paths.resolver import ClusterResolver

    return ClusterResolver.from_config(
        joined.cluster,
        joined.node,
        proven=joined.proofs(),
        is_alone=joined.verdict.is_one_host,
    )
