"""One remote call, from the caller's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mmrpc.core.reference import is_mapped
from mmrpc.rpc import executor, faults, torchrpc, wire
from mmrpc.rpc.faults import Call
from mmrpc.rpc.futures import Future, new_future
from mmrpc.rpc.reply import Reply, unseal
from mmrpc.rpc.serve import serve, serve_rref
from mmrpc.rpc.spool import peers
from mmrpc.rpc.spool import policy as spool
from mmrpc.rpc.torchrpc import UNSET, Peer

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
    call, sent, read = _send(to, func, args, kwargs, timeout)
    return read(_wait_for(sent.wait, call), call)


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
    call, sent, read = _send(to, func, args, kwargs, timeout)
    future = new_future()
    torchrpc.collect(future)

    def answer() -> Any:
        return read(_wait_for(sent.value, call), call)

    # Not on torch's thread: callbacks may call, and wait for what only those threads can complete.
    sent.add_done_callback(lambda _: executor.run_anyhow(future._complete, answer))
    return future


def message_nbytes(
    func: Callable[..., Any],
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> int:
    """Measures the message of one call, as it is given to torch's transport.

    Args:
        func: The function that would be called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        Bytes of the pickled call plus the bytes of the tensors beside it, without the
        transport's own framing.
    """
    data, carried = wire.encode((func, tuple(args or ()), dict(kwargs or {})))
    told = (torchrpc.own_name(), peers.own_address()) if torchrpc.is_initialized() else None
    data, tensors = torchrpc.pack(serve, (data, carried, told), carried)
    nbytes: int = len(data) + sum(tensor.nbytes for tensor in tensors)
    return nbytes


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
    worker, args, kwargs = torchrpc.worker_info(to), tuple(args or ()), dict(kwargs or {})
    call = Call(worker.name, _name_of(func, args), timeout)
    if _is_script(func) and not _any_mapped((args, kwargs)):
        what = (func, *_with_rrefs_of_torch(args, kwargs))
    else:
        message = wire.encode((func, args, kwargs), peers.address_of(worker.name))
        what = (serve_rref, message, {})
    return call, torchrpc.rpc.remote(worker, *what, timeout)


def result(receive: Callable[[], Any], call: Call) -> Any:
    """Gives what an RRef holds, and raises typed errors.

    Args:
        receive: Waits for it and returns it as torch has it: in a `Reply`, unless TorchScript
            or plain torch RPC made the RRef.
        call: What to tell in errors.
    """
    value = _wait_for(receive, call)
    return value.unwrap(call) if type(value) is Reply else value


def _wait_for(receive: Callable[[], Any], call: Call) -> Any:
    try:
        return receive()
    except RuntimeError as error:
        faults.raise_typed(error, call)


def _send(
    to: Peer,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> tuple[Call, Any, Callable[[Any, Call], Any]]:
    """Starts a call.

    Returns:
        The call, for errors; torch's future of its answer; and what reads that.
    """
    worker, args, kwargs = torchrpc.worker_info(to), tuple(args or ()), dict(kwargs or {})
    told = peers.introduce(worker.name)
    call = Call(worker.name, _name_of(func, args), timeout, told)
    if _is_script(func) and not _any_mapped((args, kwargs)):
        args, kwargs = _with_rrefs_of_torch(args, kwargs)
        return call, torchrpc.start(worker, func, args, kwargs, timeout), _as_it_is
    data, carried = wire.encode((func, args, kwargs), peers.address_of(worker.name))
    try:
        sent = torchrpc.start_plain(worker, serve, (data, carried, told), carried, timeout)
    except BaseException as error:
        spool.withdraw(carried)
        if isinstance(error, RuntimeError):
            faults.raise_typed(error, call)
        raise
    return call, sent, unseal


def _as_it_is(value: Any, _: Call) -> Any:
    return value


def _is_script(func: Callable[..., Any]) -> bool:
    """Whether torch runs it there without Python; that knows no wrapped RRef, and no reference."""
    if not callable(func):
        raise TypeError(f"function should be callable, not {type(func).__name__}")
    return isinstance(getattr(func, "_wrapped_async_rpc_function", func), torch.jit.ScriptFunction)


def _with_rrefs_of_torch(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    plain = tuple(getattr(arg, "torch_rref", arg) for arg in args)
    return plain, {name: getattr(arg, "torch_rref", arg) for name, arg in kwargs.items()}


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
