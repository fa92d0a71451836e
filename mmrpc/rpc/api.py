"""Joining and leaving the group of workers."""

from __future__ import annotations

import atexit
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch

from mmrpc.core.resolver import HostResolver, get_resolver, set_resolver
from mmrpc.errors import ConfigError, PeerLostError, RpcError
from mmrpc.rpc import cluster as cluster_group
from mmrpc.rpc import executor, futures, gathering, torchrpc
from mmrpc.rpc.kept import KeepingResolver
from mmrpc.rpc.options import TensorPipeRpcBackendOptions
from mmrpc.rpc.spool import policy as spool

if TYPE_CHECKING:
    from mmrpc.core.location import Resolver

_LEAVE_S = 30.0
"""How long torch's own shutdown may take once every worker is in it."""

_resolver_before: Resolver | None = None
_kept: KeepingResolver | None = None


def init_rpc(
    name: str | None = None,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: torchrpc.RpcBackendOptions | None = None,
    *,
    cluster: Any = None,
    node: str | None = None,
) -> None:
    """Makes this process a worker: it can call the others, and they can call it.

    Without arguments, what torchrun and most launchers set in the environment is used:
    ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        name: Unique name of the worker. Defaults to ``MMRPC_WORKER``, else ``worker<rank>``.
        backend: One of `BackendType`. Defaults to TensorPipe.
        rank: Unique number of the worker, from 0.
        world_size: How many workers there are. None, with a rank given, for a group that
            workers may join and leave.
        rpc_backend_options: Threads, timeout, rendezvous. Defaults to
            `TensorPipeRpcBackendOptions()`.
        cluster: The cluster's config, or the path of its file: what each node has mounted
            where. Defaults to the file that ``MMRPC_CLUSTER`` names. Without one, references
            are good on one host.
        node: Name of this node in `cluster`, and in errors. Defaults to ``MMRPC_NODE``;
            without a cluster, to the worker's name.

    Raises:
        ConfigError: If the config is wrong, or the environment lacks what was left out.
        HandshakeError: If the nodes do not prove what the config asks for.
    """
    global _kept, _resolver_before
    rank, world_size = _place(rank, world_size)
    if name is None:
        name = os.environ.get("MMRPC_WORKER") or f"worker{rank}"
    if torchrpc.is_initialized():
        raise RuntimeError("RPC is already initialized")
    if cluster is None:
        cluster = os.environ.get("MMRPC_CLUSTER")
    resolver: Resolver
    if cluster is None:
        resolver = HostResolver(node=node or os.environ.get("MMRPC_NODE") or name)
        if rpc_backend_options is None and backend in (None, torchrpc.rpc.BackendType.TENSORPIPE):
            rpc_backend_options = TensorPipeRpcBackendOptions()
    else:
        resolver, rpc_backend_options = cluster_group.prepare(
            cluster, node, name, rank, world_size, rpc_backend_options
        )
    _resolver_before = get_resolver()
    _kept = KeepingResolver(resolver)
    set_resolver(_kept)
    futures.set_devices(_devices(rpc_backend_options))
    spool.configure(cluster_group.share_above_bytes())
    try:
        with warnings.catch_warnings():
            # torch's own, about its own use of a process group: nobody here can change it.
            warnings.filterwarnings("ignore", ".*using a Backend .* as a ProcessGroup")
            torchrpc.rpc.init_rpc(name, backend, rank, world_size, rpc_backend_options)
    except BaseException:
        # torch leaves the agent behind when the first round of calls fails.
        if torchrpc.is_initialized():
            torchrpc.rpc.shutdown(graceful=False)
        _forget()
        raise
    atexit.register(_leave_at_exit)


def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """Leaves the group. Does nothing if this process is in none.

    Args:
        graceful: Whether to wait until every worker has called this, and to serve them until
            then. If not, this worker leaves at once.
        timeout: Seconds to wait for the others; None or 0 for as long as they live.

    Raises:
        PeerLostError: If a worker died; it names which. This one has left alone.
        RpcTimeoutError: If a worker did not come in time; it names which. This one has left
            alone.
    """
    if not torchrpc.is_initialized():
        return
    together = False
    error: RpcError | None = None
    try:
        if graceful:
            error = gathering.gather(timeout or None) if _is_static_group() else None
            together = error is None
    finally:
        # Also when the wait was interrupted: an agent that is left behind keeps the process.
        try:
            _leave(together)
        finally:
            executor.restart()
            _forget()
            atexit.unregister(_leave_at_exit)
    if error is not None:
        raise error


def _leave(graceful: bool) -> None:
    try:
        torchrpc.rpc.shutdown(graceful=graceful, timeout=_LEAVE_S if graceful else 0)
    except RuntimeError as error:
        # torch has torn the agent down by now.
        if graceful and "Connection reset" in str(error):
            return  # all had come; one that was done first closed the store
        raise PeerLostError(
            f"a worker was lost while the group ended ({str(error).partition(chr(10))[0]})",
            hint="Look at the logs and the exit codes of the others.",
            function="shutdown",
        ) from error


def _leave_at_exit() -> None:
    # An agent that is still there when Python has ended aborts the process: an exit code, or
    # what the program died of, would be lost.
    shutdown(graceful=False)


def _forget() -> None:
    global _kept, _resolver_before
    cluster_group.forget()
    spool.close()
    gathering.reset()
    futures.set_devices(())
    if _resolver_before is not None:
        set_resolver(_resolver_before)
        _resolver_before = None
    if _kept is not None:
        _kept.close()
        _kept = None


def _place(rank: int, world_size: int | None) -> tuple[int, int | None]:
    """Takes rank and world size from the environment if neither was given."""
    if rank != -1 or world_size is not None:
        return rank, world_size
    found = []
    for variable in ("RANK", "WORLD_SIZE"):
        text = os.environ.get(variable)
        if text is None or not text.isdecimal():
            raise ConfigError(
                f"{variable} is not set" if text is None else f"{text!r} is not a number",
                key=variable,
                hint="Pass rank and world_size, or start the workers with torchrun.",
            )
        found.append(int(text))
    return found[0], found[1]


def _devices(options: torchrpc.RpcBackendOptions | None) -> list[torch.device]:
    if not torch.cuda.is_available():
        return []
    devices = set(getattr(options, "devices", ()))
    for device_map in getattr(options, "device_maps", {}).values():
        devices.update(device for device in device_map if device.type != "cpu")
    return sorted(devices, key=lambda device: device.index or 0)


def _is_static_group() -> bool:
    return bool(getattr(torchrpc.agent(), "is_static_group", True))
