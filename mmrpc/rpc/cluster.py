"""A group of workers on a cluster: the handshake before it begins, and what it found out."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from mmrpc.errors import ConfigError
from mmrpc.rpc import starting, torchrpc
from mmrpc.rpc.options import TensorPipeRpcBackendOptions

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mmrpc.config import ClusterConfig, RpcConfig
    from mmrpc.core.resolver import Resolver
    from mmrpc.rpc.handshake import Joined, PathReport
    from mmrpc.rpc.torchrpc import RpcBackendOptions

_joined: Joined | None = None


def prepare(
    cluster: ClusterConfig | str | os.PathLike[str],
    node: str | None,
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions | None,
) -> tuple[Resolver, RpcBackendOptions]:
    """Lets the nodes prove their mounts, and gives what RPC needs afterwards.

    Args:
        cluster: The config, or the path of its file.
        node: Name of this node, if the caller knows it.
        name: Name of this worker.
        rank: Its number.
        world_size: How many there are.
        options: Those of the caller; None for those of the config.

    Raises:
        ConfigError: If the config is wrong, or the group has no fixed size.
        HandshakeError: If the nodes do not prove what the config asks for.
    """
    from mmrpc.config import ClusterConfig, load_config
    from mmrpc.rpc import handshake
    from mmrpc.rpc.handshake import table

    global _joined
    if world_size is None or rank < 0:
        raise ConfigError(
            "a cluster needs a fixed number of workers",
            hint="Pass rank and world_size, or start the workers with 'mmrpc launch'.",
        )
    init_method = "" if options is None else options.init_method
    config = cluster if isinstance(cluster, ClusterConfig) else load_config(cluster)
    joined = starting.meet(
        partial(handshake.join, config, node, name, rank, world_size, init_method),
        config.rpc.handshake_timeout_s,
        rank,
    )
    if joined.report is not None and "MMRPC_RUN_ID" in os.environ:
        # A launcher started us: what was proven comes first on its console.
        print(table.render(joined.report), file=sys.stderr, flush=True)  # noqa: T201
    if options is None:
        options = _options(joined.cluster.rpc)
    if not init_method.startswith("tcp://"):
        options.init_method = joined.init_method
    resolver = handshake.make_resolver(joined)
    _joined = joined
    return resolver, options


def _options(rpc: RpcConfig) -> RpcBackendOptions:
    chosen: dict[str, Any] = {"num_worker_threads": rpc.threads, "rpc_timeout": rpc.timeout_s}
    options: RpcBackendOptions
    if rpc.transports is None and rpc.channels is None:
        options = torchrpc.rpc.TensorPipeRpcBackendOptions(**chosen)
        return options
    if (rpc.transports, rpc.channels) != (("uv",), ("basic",)):  # our options' own choice
        for name in ("transports", "channels"):
            wanted = getattr(rpc, name)
            if wanted is not None:
                chosen[f"_{name}"] = list(wanted)
    options = TensorPipeRpcBackendOptions(**chosen)
    return options


def met() -> tuple[Store, float] | None:
    """The store of the handshake, and how long torch may take to start there, in seconds."""
    if _joined is None:
        return None
    return _joined.store, _joined.cluster.rpc.handshake_timeout_s


def forget() -> None:
    """Lets go of the handshake's store and report, at the end of the group."""
    global _joined
    _joined = None


def share_above_bytes() -> int | None:
    """From which size on the config sends plain tensors through memory; None without one."""
    return None if _joined is None else int(_joined.cluster.rpc.share_above_bytes)


def path_report() -> PathReport:
    """Tells what each node has proved about each mount: paths, rights, and whether all are one.

    Only rank 0 has the whole report; the others ask it, so that a handshake costs each node no
    more in a large cluster than in a small one.

    Raises:
        ConfigError: If this process is in no group, or the group was made without a cluster.
        RpcError: If rank 0 does not answer.
    """
    if _joined is None:
        raise ConfigError(
            "there is no report, since no cluster was given to init_rpc",
            hint="Pass init_rpc(cluster=...).",
        )
    if _joined.report is not None:
        return _joined.report
    from mmrpc.rpc.calls import rpc_sync

    report: PathReport = rpc_sync(_joined.verdict.coordinator, path_report)
    return report
