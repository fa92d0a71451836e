"""What runs on the worker that is called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.rpc.functions import async_execution

from mmrpc.rpc import executor, torchrpc, wire
from mmrpc.rpc.futures import new_future
from mmrpc.rpc.reply import Reply, seal, seal_error
from mmrpc.rpc.spool import peers

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmrpc.rpc.spool.peers import Caller

TorchFuture = torch._C.Future
"""The base of every future of torch; `torch.futures.Future` is not a base of what RPC returns."""


@dataclass(frozen=True, slots=True)
class Pending:
    """What a function of ours returns when its result is that of a future."""

    future: Any


# These two are all that torch sees of ours.


@async_execution  # type: ignore[untyped-decorator]
def serve(data: bytes, carried: list[Any], caller: Caller) -> torch.futures.Future[Any]:
    """Runs a call and completes the future with its sealed result, never with an error.

    Args:
        data: The pickled function and arguments, from `wire.encode`.
        carried: What travelled beside them.
        caller: The worker that gets the result, as `peers.introduce` says it.
    """
    receiver, sender = peers.meet(caller)
    return _start(data, carried, partial(seal, receiver=receiver, sender=sender), seal_error)


@async_execution  # type: ignore[untyped-decorator]
def serve_rref(data: bytes, carried: list[Any]) -> torch.futures.Future[Reply]:
    """Runs a call and completes the future with its `Reply`, which stays here as an RRef's value.

    Args:
        data: The pickled function and arguments, from `wire.encode`.
        carried: What travelled beside them.
    """
    return _start(data, carried, Reply, Reply.failed)


def _start(
    data: bytes,
    carried: list[Any],
    wrap: Callable[[Any], Any],
    wrap_error: Callable[[BaseException], Any],
) -> torch.futures.Future[Any]:
    """Runs a call on a thread of the executor, except in a distributed autograd context.

    torch ties such a context to its own thread.
    """
    done: torch.futures.Future[Any] = new_future()
    if torchrpc.in_autograd_context():
        _run(done, data, carried, wrap, wrap_error)
    else:
        executor.run(_run, done, data, carried, wrap, wrap_error)
    return done


def _run(
    done: torch.futures.Future[Any],
    data: bytes,
    carried: list[Any],
    wrap: Callable[[Any], Any],
    wrap_error: Callable[[BaseException], Any],
) -> None:
    try:
        func, args, kwargs = wire.decode(data, carried)
        result = func(*args, **kwargs)
        if type(result) is Pending:
            _complete_later(done, result.future, wrap, wrap_error)
            return
        if hasattr(func, "_wrapped_async_rpc_function"):
            _complete_later(done, result, wrap, wrap_error)
            return
        answer = wrap(result)
    # SystemExit and KeyboardInterrupt too: they must not leave the caller waiting.
    except BaseException as error:
        answer = wrap_error(error)
    done.set_result(answer)


def _complete_later(
    done: torch.futures.Future[Any],
    result: Any,
    wrap: Callable[[Any], Any],
    wrap_error: Callable[[BaseException], Any],
) -> None:
    if not isinstance(result, TorchFuture):
        raise TypeError(
            "a function decorated with async_execution must return a torch.futures.Future,"
            f" not {type(result).__name__}"
        )

    def complete(_: Any) -> None:
        # `result`, not the argument: what set_exception() was given hangs on that object.
        try:
            answer = wrap(result.value())
        except BaseException as error:
            answer = wrap_error(error)
        done.set_result(answer)

    result.add_done_callback(complete)
