"""A whole cluster: the model, the checks across its parts, and the workers that follow from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from mmrpc.config.crosscheck import find_problems
from mmrpc.config.models import (
    LaunchConfig,
    LogsConfig,
    MasterConfig,
    Model,
    MountConfig,
    NodeConfig,
    RoleConfig,
    RpcConfig,
)
from mmrpc.config.origin import Origin
from mmrpc.config.values import Name, Table


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of the job.

    Attributes:
        name: Role and index, such as ``trainer1``; its name in RPC.
        role: Name of the role.
        node: Name of the node.
        rank: Index in the whole cluster; 0 is on the master's node.
        role_rank: Index in the role.
        local_rank: Index on the node.
    """

    name: str
    role: str
    node: str
    rank: int
    role_rank: int
    local_rank: int


class ClusterConfig(Model):
    """A cluster: what every node must have, where each has it, and what runs there.

    Attributes:
        name: Name of the job; names its log directories.
        master: Where the ranks meet.
        nodes: The machines.
        mounts: What every node must be able to do with each mount.
        roles: What runs. Empty if you start the processes and name them yourself.
        rpc: How calls behave.
        launch: How workers are started.
        logs: Where output goes.
    """

    name: Name = "mmrpc"
    nodes: Table[NodeConfig] = Field(min_length=1)
    master: MasterConfig
    mounts: Table[MountConfig] = Field(default_factory=dict)
    roles: Table[RoleConfig] = Field(default_factory=dict)
    rpc: RpcConfig = RpcConfig()
    launch: LaunchConfig = LaunchConfig()
    logs: LogsConfig = LogsConfig()

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @model_validator(mode="before")
    @classmethod
    def _default_master(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        master, nodes = data.get("master", {}), data.get("nodes")
        if isinstance(master, Mapping) and "node" not in master and isinstance(nodes, Mapping):
            first = next(iter(nodes), None)
            return {**data, "master": {"node": first, **master}} if first else data
        return data

    @model_validator(mode="after")
    def _check_together(self) -> ClusterConfig:
        problems = find_problems(self)
        if problems:
            # One error for all, so that a person can mend the file in one go.
            raise PydanticCustomError(
                "cluster",
                "{text}",
                {
                    "text": "; ".join(f"{'.'.join(key)}: {text}" for key, text in problems),
                    "problems": problems,
                },
            )
        return self

    @property
    def origin(self) -> Origin:
        """Where each value came from; empty if the config was made in Python."""
        return self._origin

    def workers(self) -> tuple[Worker, ...]:
        """Computes the workers in order of rank.

        The order is that of the roles in the file, and of the nodes in each role; only the first
        worker on the master's node is put before all others, since rank 0 hosts the rendezvous.
        """
        placed: list[tuple[str, int, str]] = []
        for role, config in self.roles.items():
            nodes = [node for node, count in config.workers.items() for _ in range(count)]
            placed += [(role, index, node) for index, node in enumerate(nodes)]
        first = next((i for i, (_, _, node) in enumerate(placed) if node == self.master.node), 0)
        if placed:
            placed.insert(0, placed.pop(first))
        local_ranks: dict[str, int] = {}
        workers = []
        for rank, (role, index, node) in enumerate(placed):
            local_rank = local_ranks.get(node, 0)
            local_ranks[node] = local_rank + 1
            workers.append(Worker(f"{role}{index}", role, node, rank, index, local_rank))
        return tuple(workers)

    def workers_on(self, node: str) -> tuple[Worker, ...]:
        """Computes the workers of one node, in order of rank."""
        return tuple(worker for worker in self.workers() if worker.node == node)

    def is_one_host(self) -> bool:
        """Whether all nodes have the same host, as far as the config says."""
        return len({node.host for node in self.nodes.values()}) == 1


def config_hash(cluster: ClusterConfig) -> str:
    """Computes what nodes compare to know that they have the same config.

    It covers the resolved values, whichever file, format or ``--set`` they came from, and the
    ranks that follow from them; not the text.
    """
    ranks = [(worker.name, worker.node) for worker in cluster.workers()]
    resolved = [cluster.model_dump(mode="json"), ranks]
    text = json.dumps(resolved, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
