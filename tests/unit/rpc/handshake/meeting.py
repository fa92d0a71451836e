"""A handshake of several ranks in threads of one process, over a store in its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.distributed import HashStore

from mmrpc.config import ClusterConfig
from mmrpc.paths import probing
from mmrpc.rpc.handshake.board import Board
from mmrpc.rpc.handshake.joining import Coordination, introduce, take_part
from mmrpc.rpc.handshake.messages import Hello, Verdict
from mmrpc.rpc.handshake.report import PathReport
from mmrpc.rpc.handshake.tasks import NodeTasks

PREFIX = "test/"
_TIMEOUT_S = 60.0


@dataclass
class Outcome:
    """What came of a meeting: a verdict or an exception per rank, and the report of rank 0."""

    verdicts: dict[int, Verdict] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    report: PathReport = field(default_factory=PathReport)

    @property
    def verdict(self) -> Verdict:
        """The one that all ranks have."""
        assert not self.errors, self.errors
        first, *others = self.verdicts.values()
        assert all(other == first for other in others)
        return first


def probe_in_thread(mounts, timeout_s, node):
    """Probes without a helper process, which would cost each rank a second here."""
    return [probing.probe(mount, node=node) for mount in mounts]


def meet(
    clusters: ClusterConfig | Sequence[ClusterConfig],
    nodes: Sequence[str],
    *,
    world_size: int | None = None,
    change: Callable[[Hello], Hello] = lambda hello: hello,
    tasks: Callable[[ClusterConfig, str], NodeTasks] | None = None,
) -> Outcome:
    """Runs a handshake; rank i is on ``nodes[i]`` with ``clusters[i]`` (or all with the one).

    Args:
        clusters: The configs.
        nodes: The node of each rank that comes.
        world_size: How many are awaited; as many as come, if not given.
        change: Changes what a rank says of itself.
        tasks: Makes what does a node's part.
    """
    if isinstance(clusters, ClusterConfig):
        clusters = [clusters] * len(nodes)
    size = world_size or len(nodes)
    outcome = Outcome()
    store = HashStore()

    def run(rank: int) -> None:
        cluster = clusters[rank]
        hello = change(introduce(cluster, nodes[rank], f"w{rank}", rank, size))
        make = tasks or (lambda cluster, node: NodeTasks(cluster, node, probe_in_thread))
        try:
            part = make(cluster, nodes[rank])
            outcome.verdicts[rank] = take_part(Board(store, PREFIX), hello, part)
        except BaseException as error:
            outcome.errors[rank] = error

    coordination = Coordination(
        clusters[0],
        introduce(clusters[0], nodes[0], "w0", 0, size),
        size,
        lambda: Board(store, PREFIX),
    )
    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(nodes))
    ]
    coordination.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_S)
        assert not thread.is_alive(), "a rank hangs"
    coordination.join()
    outcome.report = coordination.report
    return outcome
