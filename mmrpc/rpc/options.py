"""How the workers talk: TensorPipe's options, with a transport that sleeps while it waits."""

from __future__ import annotations

import inspect
import os
import warnings
from typing import Any

import torch.distributed.rpc as torch_rpc

_TRANSPORTS_VARIABLE = "MMRPC_TRANSPORTS"
"""Comma-separated TensorPipe transports, or ``default`` for torch's own choice."""


class TensorPipeRpcBackendOptions(torch_rpc.TensorPipeRpcBackendOptions):
    """`torch.distributed.rpc.TensorPipeRpcBackendOptions` over TCP, unless asked otherwise.

    torch prefers its shared-memory transport, which polls: each idle worker keeps a whole core
    busy. References are small, so that TCP with its sleeping threads is as fast for them. To
    send large tensors by value on one host, choose with ``_transports=["shm", "uv"]`` or with
    ``MMRPC_TRANSPORTS=default`` in the environment.

    Args:
        num_worker_threads: Threads of torch's that receive calls and complete futures.
            Functions run on threads of ours, except those in a distributed autograd context.
        **kwargs: The other options of torch's class.
    """

    def __init__(self, *, num_worker_threads: int | None = None, **kwargs: Any) -> None:
        if num_worker_threads is not None:
            kwargs["num_worker_threads"] = num_worker_threads
            if num_worker_threads < 2:
                warnings.warn(
                    "num_worker_threads below 2: a nested call in a distributed autograd context,"
                    " or through torch's own rpc functions, waits for the thread that it is on",
                    stacklevel=2,
                )
        if kwargs.get("_transports") is None and kwargs.get("_channels") is None:
            kwargs.update(_quiet_transport())
        super().__init__(**kwargs)


def _quiet_transport() -> dict[str, list[str]]:
    # Private options of torch: where they are gone, its own choice stands.
    known = inspect.signature(torch_rpc.TensorPipeRpcBackendOptions.__init__).parameters
    if "_transports" not in known or "_channels" not in known:
        return {}
    wanted = os.environ.get(_TRANSPORTS_VARIABLE, "uv")
    if wanted == "default":
        return {}
    transports = [name.strip() for name in wanted.split(",") if name.strip()]
    # The other channels move tensors through shared memory of their own, and poll as well.
    return {"_transports": transports, **({"_channels": ["basic"]} if wanted == "uv" else {})}
