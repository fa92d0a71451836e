"""`torch.distributed.rpc` that sends references: the same names, used the same way.

Mapped tensors go by reference in arguments, results and RRefs, at any depth. What a worker
raises arrives as the same exception, and nothing waits for a worker that has died.
"""

from __future__ import annotations

from torch._C._distributed_rpc import RpcBackendOptions, WorkerInfo, get_rpc_timeout
from torch.distributed.rpc import (
    BackendType,
    get_worker_info,
    is_available,
)
from torch.distributed.rpc.api import AllGatherStates, method_factory, new_method
from torch.distributed.rpc.backend_registry import (
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)

from mmrpc.rpc import functions, plain
from mmrpc.rpc.api import init_rpc, shutdown
from mmrpc.rpc.calls import message_nbytes, rpc_async, rpc_sync
from mmrpc.rpc.cluster import path_report
from mmrpc.rpc.futures import Future, collect_all, wait_all
from mmrpc.rpc.options import TensorPipeRpcBackendOptions
from mmrpc.rpc.rref import RRef, remote

PyRRef = RRef
"""In torch the class of the RRefs that `remote` returns; here there is one class of RRef."""

plain.register()

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "Future",
    "PyRRef",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "backend_registered",
    "collect_all",
    "construct_rpc_backend_options",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "message_nbytes",
    "method_factory",
    "new_method",
    "path_report",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]
