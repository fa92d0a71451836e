"""Futures that keep the type and the attributes of an exception.

A future of torch loses them wherever an exception crosses its C++ part, as in the future that
`then` returns. These complete themselves instead, and hang the exception on what torch calls
before it hands a value out: its `wait_all` and `collect_all` raise it as it is, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.futures import collect_all, wait_all

from mmrpc.errors import RpcError
from mmrpc.rpc import torchrpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
S = TypeVar("S")

__all__ = ["Future", "collect_all", "new_future", "set_devices", "wait_all"]

_devices: tuple[torch.device, ...] = ()


def set_devices(devices: Sequence[torch.device]) -> None:
    """Says which accelerators the values of futures may be on; torch wants to know ahead."""
    global _devices
    _devices = tuple(devices)


class Future(torch.futures.Future[T]):
    """A `torch.futures.Future` whose errors stay what they were, through `then` as well."""

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """Gives the future of what the callback returns, or raises.

        Args:
            callback: Gets this future when it is done.
        """
        child: Future[S] = new_future()

        # The closure holds this object: its failure is known to it, not to torch's C++ future.
        def run(_: Any) -> None:
            child._complete(lambda: callback(self))

        super().add_done_callback(run)
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Calls back with this future when it is done.

        Args:
            callback: Gets this future. What it raises is logged by torch.
        """
        super().add_done_callback(lambda _: callback(self))

    def set_exception(self, result: Any) -> None:
        """Completes the future with an exception.

        Args:
            result: The exception, which `wait`, `value`, and torch's `wait_all` raise.
        """
        if not isinstance(result, Exception):
            raise TypeError(f"not an Exception: {result!r}")

        def raise_it(_: Any) -> None:
            raise result

        super()._set_unwrap_func(raise_it)
        super().set_result(torchrpc.remote_exception(result))

    def _complete(self, compute: Callable[[], T]) -> None:
        try:
            value = compute()
        except Exception as error:
            self.set_exception(error)
        except BaseException as error:
            # torch wants an Exception; a callback that exits must not leave waiters behind.
            failure = RpcError(f"a callback raised {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.set_exception(failure)
        else:
            self.set_result(value)


def new_future() -> Future[Any]:
    """Makes an empty future that may hold values on the devices of this worker."""
    return Future(devices=list(_devices))
