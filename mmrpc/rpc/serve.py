"""What runs on the worker that is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.rpc.functions import async_execution

from mmrpc.rpc import executor, torchrpc, wire
from mmrpc.rpc.futures import new_future
from mmrpc.rpc.reply import Reply

if TYPE_CHECKING:
    from mmrpc.rpc.spool.peers import Address

TorchFuture = torch._C.Future
"""The base of every future of torch; `torch.futures.Future` is not a base of what RPC returns."""


@dataclass(frozen=True, slots=True)
class Pending:
    """What a function of ours returns when its result is that of a future."""

    future: Any


@async_execution  # type: ignore[untyped-decorator]
def serve(
    data: bytes, carried: list[Any], caller: Address | None = None
) -> torch.futures.Future[Reply]:
    """Runs a call and completes the future with its `Reply`, never with an error.

    This is the one function that torch sees of ours. Calls run on the executor's threads, except
    in a distributed autograd context: torch ties that to its own thread.

    Args:
        data: The pickled function and arguments, from `wire.encode`.
        carried: What travelled beside them.
        caller: The process that will get the reply, if nobody else can.
    """
    done: torch.futures.Future[Reply] = new_future()
    if torchrpc.in_autograd_context():
        _run(done, data, carried, caller)
    else:
        executor.run(_run, done, data, carried, caller)
    return done


def _run(
    done: torch.futures.Future[Reply],
    data: bytes,
    carried: list[Any],
    caller: Address | None,
) -> None:
    try:
        func, args, kwargs = wire.decode(data, carried)
        result = func(*args, **kwargs)
        if isinstance(result, Pending):
            _complete_later(done, result.future, caller)
            return
        if hasattr(func, "_wrapped_async_rpc_function"):
            _complete_later(done, result, caller)
            return
        reply = Reply.of(result, caller)
    # SystemExit and KeyboardInterrupt too: they must not leave the caller waiting.
    except BaseException as error:
        reply = Reply.failed(error)
    done.set_result(reply)


def _complete_later(done: torch.futures.Future[Reply], result: Any, caller: Address | None) -> None:
    if not isinstance(result, TorchFuture):
        raise TypeError(
            "a function decorated with async_execution must return a torch.futures.Future,"
            f" not {type(result).__name__}"
        )

    def complete(_: Any) -> None:
        # `result`, not the argument: what set_exception() was given hangs on that object.
        try:
            reply = Reply.of(result.value(), caller)
        except BaseException as error:
            reply = Reply.failed(error)
        done.set_result(reply)

    result.add_done_callback(complete)
