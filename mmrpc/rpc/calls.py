"""One remote call, from the caller's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mmrpc.core.reference import is_mapped
from mmrpc.rpc import faults, torchrpc, wire
from mmrpc.rpc.faults import Call
from mmrpc.rpc.futures import Future, new_future
from mmrpc.rpc.reply import Reply
from mmrpc.rpc.serve import serve
from mmrpc.rpc.spool import peers
from mmrpc.rpc.spool import policy as spool
from mmrpc.rpc.torchrpc import UNSET, Peer, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def rpc_sync(
    to: Peer,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> Any:
    """Runs a function on another worker and gives its result.

    Mapped tensors in the arguments and in the result go as references, at any depth.

    Args:
        to: Name, rank or `WorkerInfo` of the worker.
        func: The function; the worker imports it by name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds to wait; 0 for no limit. Defaults to the one given to `init_rpc`.

    Returns:
        What the function returned.

    Raises:
        PathError: If a reference could not be opened there, or, for the result, here.
        RpcTimeoutError: If no answer came in time.
        PeerLostError: If the worker died.
        RemoteError: If the function raised what cannot be rebuilt here; anything else that it
            raised is raised as it was.
    """
    call, *what = _prepare(to, func, args, kwargs, timeout)
    return result(lambda: torchrpc.rpc.rpc_sync(to, *what, timeout), call)


def rpc_async(
    to: Peer,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> Future[Any]:
    """Runs a function on another worker and gives a future of its result.

    Args:
        to: Name, rank or `WorkerInfo` of the worker.
        func: The function; the worker imports it by name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds to wait; 0 for no limit. Defaults to the one given to `init_rpc`.

    Returns:
        A future; its `wait` and `value` return and raise what `rpc_sync` does.
    """
    call, *what = _prepare(to, func, args, kwargs, timeout)
    sent = torchrpc.rpc.rpc_async(to, *what, timeout)
    future = new_future()
    _stand_in_for(sent, future)
    sent.add_done_callback(lambda _: future._complete(lambda: result(sent.value, call)))
    return future


def send_remote(
    to: Peer,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> tuple[Call, Any]:
    """Runs a function on another worker, where its `Reply` stays.

    Returns:
        The call, for errors, and torch's RRef of the reply.
    """
    call, *what = _prepare(to, func, args, kwargs, timeout, is_reply_ours=False)
    return call, torchrpc.rpc.remote(to, *what, timeout)


def result(receive: Callable[[], Any], call: Call) -> Any:
    """Gives what a call or an RRef holds, and raises typed errors.

    Args:
        receive: Waits for the answer and returns it as torch has it.
        call: What to tell in errors.
    """
    try:
        value = receive()
    except RuntimeError as error:
        typed = faults.typed(error, call)
        if typed is None:
            raise
        raise typed from error
    return value.unwrap(call) if isinstance(value, Reply) else value


def peer_name(to: Peer) -> str:
    """Gives the name of a worker, or what it was called by if torch does not know it."""
    if isinstance(to, int):
        try:
            to = torchrpc.rpc.get_worker_info(to)
        except (RuntimeError, TypeError):
            return str(to)
    return to.name if isinstance(to, WorkerInfo) else str(to)


def _prepare(
    to: Peer,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
    *,
    is_reply_ours: bool = True,
) -> tuple[Call, Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Says which function torch is to call, and with what.

    Args:
        to: As for `rpc_sync`, like the next four.
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds to wait.
        is_reply_ours: Whether the reply comes here, once; not so for an RRef's value.
    """
    if not callable(func):
        raise TypeError(f"function should be callable, not {type(func).__name__}")
    args, kwargs = tuple(args or ()), dict(kwargs or {})
    call = Call(peer_name(to), _name_of(func, args), timeout)
    script = getattr(func, "_wrapped_async_rpc_function", func)
    if isinstance(script, torch.jit.ScriptFunction) and not _any_mapped((args, kwargs)):
        # torch runs it there without Python; that knows no wrapped RRef, and no reference.
        plain = tuple(getattr(arg, "torch_rref", arg) for arg in args)
        return call, func, plain, {k: getattr(v, "torch_rref", v) for k, v in kwargs.items()}
    receiver = peers.address_of(call.peer)
    message = wire.encode((func, args, kwargs), receiver)
    return call, serve, (*message, spool.own_address(receiver) if is_reply_ours else None), {}


def _any_mapped(value: Any) -> bool:
    """Whether a mapped tensor is among what TorchScript takes: tensors in plain containers."""
    if isinstance(value, torch.Tensor):
        return is_mapped(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return False
    return any(map(_any_mapped, value))


def _name_of(func: Callable[..., Any], args: Sequence[Any]) -> str:
    name = getattr(func, "__qualname__", None) or type(func).__qualname__
    describe = getattr(func, "describe_call", None)
    return str(describe(args)) if describe is not None else str(name)


def _stand_in_for(sent: Any, future: Future[Any]) -> None:
    # torch's `_wait_all()` context collects the futures made in it; it is to see the results.
    local = getattr(torchrpc.rpc.api, "_thread_local_var", None)
    collected = getattr(local, "future_list", None)
    if collected and collected[-1] is sent:
        collected[-1] = future
