"""What is used of `torch.distributed.rpc`: one place for its private names and missing types."""

from __future__ import annotations

import codecs
import ctypes
import pickle
from typing import Any, TypeAlias

import torch
import torch.distributed.autograd as _autograd
import torch.distributed.rpc as _rpc
from torch._C._distributed_rpc import RpcBackendOptions, WorkerInfo
from torch.distributed.rpc import internal as _internal
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT

from mmrpc.errors import RpcError

__all__ = ["Peer", "RpcBackendOptions", "WorkerInfo"]

Peer: TypeAlias = str | int | WorkerInfo
"""How a caller may name a worker: by name, rank or `WorkerInfo`."""

UNSET: float = UNSET_RPC_TIMEOUT
"""The timeout that stands for the one of `init_rpc`."""

rpc: Any = _rpc
"""The package, which has hardly any types."""

autograd: Any = _autograd
"""Distributed autograd."""

internal: Any = _internal
"""torch's own pickling of calls."""

_MOST_NAMED = 20
"""How many workers an error names."""

_api: Any = _rpc.api
_invoke_any: Any = getattr(_api, "_invoke_rpc", None)
_invoke_python: Any = getattr(_api, "_invoke_rpc_python_udf", None)
_is_profiled: Any = getattr(torch.autograd, "_profiler_enabled", lambda: True)


def agent() -> Any:
    """Gives the agent of this process."""
    return rpc._get_current_rpc_agent()


def is_initialized() -> bool:
    """Whether this process has joined a group."""
    return bool(rpc._is_current_rpc_agent_set())


def default_timeout_s() -> float:
    """Gives the time limit of calls that do not pass one, in seconds."""
    return float(rpc.get_rpc_timeout())


def worker_info(to: Peer) -> WorkerInfo:
    """Gives what torch knows of a worker.

    Raises:
        RpcError: If the group has no such worker.
        RuntimeError: torch's, if there is no group.
    """
    if isinstance(to, WorkerInfo):
        return to
    if not isinstance(to, (str, int)):
        raise ValueError(f"a worker is named by its name, rank or WorkerInfo, not {to!r}")
    # Where there is no group yet, the public function is asked for its error.
    group = agent() if is_initialized() else rpc
    try:
        info: WorkerInfo = group.get_worker_info(to)
    except RuntimeError as error:
        if not is_initialized():
            raise
        raise _unknown(to) from error
    return info


def _unknown(worker: str | int) -> RpcError:
    names = sorted(info.name for info in agent().get_worker_infos())
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return RpcError(
        "no worker of this group has that " + ("name" if isinstance(worker, str) else "rank"),
        hint=f"The group has {', '.join(names[:_MOST_NAMED])}{more}.",
        peer=str(worker),
    )


def own_name() -> str:
    """Gives the name of this worker."""
    return str(agent().get_worker_info().name)


def start(
    to: WorkerInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
) -> Any:
    """Starts a call of torch and gives its future, of which a `_wait_all()` does not hear."""
    if _invoke_any is None:
        return rpc.rpc_async(to, func, args, kwargs, timeout)
    return _invoke_any(to, func, internal.RPCExecMode.ASYNC, args, kwargs, timeout)


def start_plain(
    to: WorkerInfo, func: Any, args: tuple[Any, ...], carried: list[Any], timeout: float
) -> Any:
    """Starts a call of an `async_execution` function, by the shortest way that torch has.

    It is what torch does in the end, once it has found that the function is Python's and that
    nobody profiles.

    Args:
        to: The worker.
        func: The function.
        args: Its arguments: plain values, and `carried` among them.
        carried: The list in `args` of what only torch can send.
        timeout: Seconds to wait.
    """
    if _invoke_python is None or _is_profiled():
        return start(to, func, args, {}, timeout)
    data, tensors = pack(func, args, carried)
    return _invoke_python(to, data, tensors, timeout, True)


def pack(func: Any, args: tuple[Any, ...], carried: list[Any]) -> tuple[bytes, list[torch.Tensor]]:
    """Gives a call as torch sends it: bytes, and the tensors beside them."""
    call = internal.PythonUDF(func, args, {})
    if not carried:  # nothing in it needs torch's pickler
        return pickle.dumps(call, pickle.HIGHEST_PROTOCOL), []
    packed: tuple[bytes, list[torch.Tensor]] = _api._default_pickler.serialize(call)
    return packed


def collect(future: Any) -> None:
    """Adds a future to those that torch's `_wait_all()` context of this thread waits for."""
    collected = getattr(getattr(_api, "_thread_local_var", None), "future_list", None)
    if collected is not None:
        collected.append(future)


def in_autograd_context() -> bool:
    """Whether this thread runs inside a distributed autograd context.

    torch has no public question for it; where the private one is missing, the answer is no.
    """
    current = getattr(autograd, "_current_context", None)
    if current is None:
        return False
    try:
        if not _may_have_context():
            return False
        current()
    except RuntimeError:  # no context here, or no distributed autograd in this process yet
        return False
    return True


def remote_exception(error: Exception) -> Any:
    """Gives what torch's own callers take for an exception rather than for a value.

    It is what they get when a function that torch calls returns a future that failed.
    """
    cls = getattr(internal, "RemoteException", None)
    if cls is None:
        return error
    try:
        # They decode the text's escapes before they raise the class with it. Not by the codec's
        # name: a process that changed its user may be unable to import that.
        text = codecs.unicode_escape_encode(str(error))[0].decode("ascii")
    except BaseException:  # whoever completes a future with an error must not meet another
        text = "<its text cannot be read>"
    return cls(text, type(error))


def _may_have_context() -> bool:
    """Whether there is any context in this process; asking for one costs an exception if not."""
    tell = getattr(autograd, "_get_debug_info", None)
    return tell is None or bool(tell().get("num_autograd_contexts", True))


def in_barrier() -> set[str]:
    """Names of the workers in torch's own graceful shutdown, on the one that counts them.

    That is the one whose name comes first; on the others it is nobody.
    """
    waiting = getattr(_api, "_all_gather_sequence_id_to_states", {})
    return {name for states in list(waiting.values()) for name in states.gathered_objects}


def abandon_agent() -> None:
    """Makes torch forget the agent of this process, which stays in memory as it is.

    For a child that was forked: the agent's end would wait for threads that are not there.
    """
    reset = getattr(_api, "_reset_current_rpc_agent", None)
    if is_initialized() and reset is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent()))
        reset()


def pickler() -> Any:
    """Gives torch's pickler of calls, or None where it has another name."""
    return getattr(internal, "_internal_rpc_pickler", None)
