"""How the handshake grows with the cluster: its real code, N ranks as threads, one TCP store.

    python benchmarks/handshake_scale.py            1, 10, 100 and 1,000 nodes
    python benchmarks/handshake_scale.py 50 200     other sizes

Each node has one rank and two mounts, one for writing and one for reading, which are two local
directories. The ranks share one Python interpreter, so that the time is an upper bound: in a
cluster each node has its own, and only the coordinator's share is serial.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore

from mmrpc.config import ClusterConfig, config_hash, parse_config
from mmrpc.paths import probing
from mmrpc.rpc.handshake.board import Board
from mmrpc.rpc.handshake.joining import Coordination, introduce, take_part
from mmrpc.rpc.handshake.tasks import NodeTasks

SIZES = (1, 10, 100, 1000)
_TIMEOUT = timedelta(seconds=600)


class CountingStore:
    """A client of the store that counts what it sends and receives.

    Attributes:
        calls: Round trips.
        nbytes: Bytes of keys and values.
    """

    def __init__(self, port: int) -> None:
        self._store = TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT
        )
        self.calls = 0
        self.nbytes = 0

    def _count(self, *parts: str | bytes) -> None:
        self.calls += 1
        self.nbytes += sum(map(len, parts))

    def add(self, key: str, amount: int) -> int:
        self._count(key)
        return self._store.add(key, amount)

    def set(self, key: str, value: str) -> None:
        self._count(key, value)
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count(*keys)
        self._store.wait(keys, timeout)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count(key, value)
        return value


@dataclass
class Result:
    """One handshake.

    Attributes:
        nodes: How many nodes.
        total_s: From the first word until every rank has the verdict.
        node_calls: Most round trips to the store of any node but the coordinator's.
        node_bytes: Most bytes.
        coordinator_s: Processor time of the coordinator.
        coordinator_calls: Its round trips.
        coordinator_bytes: Its bytes.
        config_s: Time for one node to check its copy of the config and compute its hash.
    """

    nodes: int
    total_s: float
    node_calls: int
    node_bytes: int
    coordinator_s: float
    coordinator_calls: int
    coordinator_bytes: int
    config_s: float


class _TimedCoordination(Coordination):
    cpu_s = 0.0

    def _run(self) -> None:
        start = time.thread_time()
        super()._run()
        self.cpu_s = time.thread_time() - start


def make_cluster(nodes: int, directories: tuple[str, str]) -> ClusterConfig:
    """A cluster of that many nodes."""
    mounts = dict(zip(("params", "data"), directories, strict=True))
    return parse_config(
        {
            "nodes": {f"node{i:04}": {"host": f"10.0.{i // 256}.{i % 256}", "mounts": mounts}
                      for i in range(nodes)},
            "mounts": {"params": {"access": "write"}, "data": {"access": "read"}},
            "roles": {"trainer": {"target": "train:train",
                                  "workers": {f"node{i:04}": 1 for i in range(nodes)}}},
            # All nodes share one interpreter here, so that each answers late.
            "rpc": {"handshake_timeout_s": 300, "mount_timeout_s": 120},
        }
    )  # fmt: skip


def measure(nodes: int) -> Result:
    """Runs one handshake."""
    with tempfile.TemporaryDirectory() as params, tempfile.TemporaryDirectory() as data:
        start = time.perf_counter()
        cluster = make_cluster(nodes, (params, data))
        config_hash(cluster)
        config_s = time.perf_counter() - start
        return _measure(cluster, nodes, config_s)


def _measure(cluster: ClusterConfig, nodes: int, config_s: float) -> Result:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    names = list(cluster.nodes)
    # In a cluster each process does this once, at the same time; here it would be N times.
    template = introduce(cluster, names[0], "w0", 0, nodes)
    clients = _connect(server.port, nodes + 2)
    begin = threading.Barrier(nodes + 1)
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        hello = template.model_copy(
            update={"rank": rank, "worker": f"trainer{rank}", "node": names[rank]}
        )
        tasks = NodeTasks(cluster, names[rank], _probe)
        begin.wait()
        try:
            verdict = take_part(Board(clients[rank], "bench/"), hello, tasks)
            if verdict.problems:
                raise RuntimeError(verdict.problems[0].sentence())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(nodes)]
    spare = iter(clients[nodes:])
    coordination = _TimedCoordination(
        cluster, template, nodes, lambda: Board(next(spare), "bench/")
    )
    for thread in threads:
        thread.start()
    coordination.start()
    begin.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    total_s = time.perf_counter() - start
    coordination.join()
    if failures:
        raise failures[0]
    ranks, coordinator = clients[:nodes], clients[nodes]
    return Result(
        nodes,
        total_s,
        max(client.calls for client in ranks),
        max(client.nbytes for client in ranks),
        coordination.cpu_s,
        coordinator.calls,
        coordinator.nbytes,
        config_s,
    )


def _connect(port: int, count: int) -> list[CountingStore]:
    clients: list[CountingStore] = []
    # torch asks for the name of each peer's address when it connects: a few at a time.
    threads = [
        threading.Thread(target=lambda: clients.append(CountingStore(port))) for _ in range(count)
    ]
    for first in range(0, count, 64):
        batch = threads[first : first + 64]
        for thread in batch:
            thread.start()
        for thread in batch:
            thread.join()
    return clients


def _probe(mounts, timeout_s, node):
    # A process for each of a thousand nodes would measure this machine.
    return [probing.probe(mount, node=node) for mount in mounts]


COLUMNS = (
    "nodes",
    "all have the verdict",
    "calls per node",
    "bytes per node",
    "coordinator, CPU",
    "its calls",
    "its bytes",
    "config checked",
)


def main() -> None:
    """Prints a table in Markdown."""
    sizes = tuple(map(int, sys.argv[1:])) or SIZES
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---:" * len(COLUMNS) + "|")
    for nodes in sizes:
        found = measure(nodes)
        cells = (
            f"{nodes:,}",
            f"{found.total_s * 1e3:,.0f} ms",
            f"{found.node_calls}",
            f"{found.node_bytes:,}",
            f"{found.coordinator_s * 1e3:,.0f} ms",
            f"{found.coordinator_calls:,}",
            f"{found.coordinator_bytes:,}",
            f"{found.config_s * 1e3:,.0f} ms",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
