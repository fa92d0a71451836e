"""Joining and leaving the group of workers."""

from __future__ import annotations

import atexit
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mmrpc.core.resolver import HostResolver, get_resolver, set_resolver
from mmrpc.errors import ConfigError, PeerLostError, RpcError
from mmrpc.rpc import cluster as cluster_group
from mmrpc.rpc import (
    executor,
    futures,
    gathering,
    rendezvous,
    rollcall,
    starting,
    torchrpc,
)
from mmrpc.rpc.kept import KeepingResolver
from mmrpc.rpc.options import TensorPipeRpcBackendOptions
from mmrpc.rpc.spool import policy as spool

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mmrpc.core.resolver import Resolver

_LEAVE_S = 30.0
"""How long torch's own shutdown may take once every worker is in it."""

_INIT_TIMEOUT_VARIABLE = "MMRPC_INIT_TIMEOUT_S"
"""Seconds to wait for the others in `init_rpc`, where no config says it; 0 leaves it to torch."""
_INIT_TIMEOUT_LEAST_S = 30.0
"""Without that variable: a short limit for calls does not mean that workers start together."""

_resolver_before: Resolver | None = None
_kept: KeepingResolver | None = None
_group = 0
"""Number of the group that this process is in, or was in last."""
_is_fork = False
_leaving = threading.RLock()  # a signal's handler may leave, too


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

    It waits for the others for ``rpc.handshake_timeout_s`` of the cluster's config. Without
    one, for the number of seconds in ``MMRPC_INIT_TIMEOUT_S``, else for ``rpc_timeout`` of the
    options, but at least 30 s. Where the group has no fixed size, where the ranks meet over a
    file, and where that variable is 0, torch waits, as long as it does.

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
        HandshakeError: If workers are absent or do not fit together, on every rank that came;
            or if the nodes do not prove what the config asks for.
        RpcError: If this process was forked from one that has been a worker.
    """
    global _group
    rank, world_size = _place(rank, world_size)
    if name is None:
        name = os.environ.get("MMRPC_WORKER") or f"worker{rank}"
    if torchrpc.is_initialized():
        raise RuntimeError("RPC is already initialized")
    if _is_fork:
        raise RpcError(
            "RPC cannot begin in a process that was forked from a worker",
            hint="Start it by multiprocessing's spawn or forkserver, or before init_rpc.",
        )
    if cluster is None:
        cluster = os.environ.get("MMRPC_CLUSTER")
    with rendezvous.telling_of_descriptors(rank):
        _begin(name, backend, rank, world_size, rpc_backend_options, cluster, node)
    _group += 1
    atexit.register(_leave_at_exit)


def _begin(
    name: str,
    backend: Any,
    rank: int,
    world_size: int | None,
    rpc_backend_options: torchrpc.RpcBackendOptions | None,
    cluster: Any,
    node: str | None,
) -> None:
    global _kept, _resolver_before
    resolver: Resolver
    if cluster is None:
        resolver = HostResolver(node=node or os.environ.get("MMRPC_NODE") or name)
        if rpc_backend_options is None and backend in (None, torchrpc.rpc.BackendType.TENSORPIPE):
            rpc_backend_options = TensorPipeRpcBackendOptions()
        met = _meet(name, backend, rank, world_size, rpc_backend_options)
    else:
        resolver, rpc_backend_options = cluster_group.prepare(
            cluster, node, name, rank, world_size, rpc_backend_options
        )
        met = cluster_group.met()
    _resolver_before = get_resolver()
    _kept = KeepingResolver(resolver)
    set_resolver(_kept)
    try:
        futures.set_devices(_devices(rpc_backend_options))
        spool.configure(cluster_group.share_above_bytes())
        if met is None or world_size is None or rpc_backend_options is None:
            starting.start(name, backend, rank, world_size, rpc_backend_options)
        else:
            starting.start_at(*met, name, backend, rank, world_size, rpc_backend_options)
            rollcall.begun()
    except BaseException:
        starting.stop()
        _forget()
        raise


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
    group, together, was_in = _group, False, True
    error: RuntimeError | None = None
    try:
        if graceful:
            error = gathering.gather(timeout or None) if _is_static_group() else None
            together = error is None
    except RuntimeError as failure:
        error = failure
    finally:
        # Also when the wait was interrupted: an agent that is left behind keeps the process.
        with _leaving:
            was_in = _is_in(group)
            if was_in:
                _leave_and_forget(together)
    # If another thread has left meanwhile, that is all that went wrong here.
    if error is not None and was_in:
        raise error


def _is_in(group: int) -> bool:
    """Whether this process is still in a group; another thread may have left it."""
    return group == _group and torchrpc.is_initialized()


def _leave_and_forget(graceful: bool) -> None:
    try:
        _leave(graceful)
    finally:
        executor.restart()
        _forget()
        atexit.unregister(_leave_at_exit)


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


def _meet(
    name: str,
    backend: Any,
    rank: int,
    world_size: int | None,
    options: torchrpc.RpcBackendOptions | None,
) -> tuple[Store, float] | None:
    """Waits for the other ranks, where that can be done without torch.

    Returns:
        The store at which they met, and the time limit; None if it is torch that waits: in a
        group that workers may join and leave, over a file, or with another backend.
    """
    if not (world_size and isinstance(options, torchrpc.rpc.TensorPipeRpcBackendOptions)):
        return None
    if backend not in (None, torchrpc.rpc.BackendType.TENSORPIPE) or not isinstance(name, str):
        return None
    timeout_s = _init_timeout_s(options)
    endpoint = rendezvous.find_plain_endpoint(options.init_method)
    if endpoint is None or not timeout_s:
        return None
    meeting = partial(rollcall.meet, endpoint, name, rank, world_size, timeout_s)
    return starting.meet(meeting, timeout_s, rank), timeout_s


def _init_timeout_s(options: torchrpc.RpcBackendOptions) -> float:
    text = os.environ.get(_INIT_TIMEOUT_VARIABLE)
    if text is None:
        return max(float(options.rpc_timeout), _INIT_TIMEOUT_LEAST_S)
    try:
        return max(float(text), 0.0)
    except ValueError:
        raise ConfigError(
            f"{text!r} is not a number of seconds", key=_INIT_TIMEOUT_VARIABLE
        ) from None


def _devices(options: torchrpc.RpcBackendOptions | None) -> list[torch.device]:
    if not torch.cuda.is_available():
        return []
    devices = set(getattr(options, "devices", ()))
    for device_map in getattr(options, "device_maps", {}).values():
        devices.update(device for device in device_map if device.type != "cpu")
    return sorted(devices, key=lambda device: device.index or 0)


def _is_static_group() -> bool:
    return bool(getattr(torchrpc.agent(), "is_static_group", True))


def _in_child() -> None:
    global _kept, _is_fork, _leaving, _resolver_before
    _is_fork = _group > 0
    _leaving = threading.RLock()
    atexit.unregister(_leave_at_exit)
    cluster_group.forget()
    gathering.reset()
    if _resolver_before is not None:
        set_resolver(_resolver_before)
        _resolver_before = _kept = None


os.register_at_fork(after_in_child=_in_child)
