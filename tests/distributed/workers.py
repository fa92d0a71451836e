"""How the distributed tests start their workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmrpc.testing import run_workers
from tests import forked


def run(fn: Callable[..., Any], n: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Runs a function in n workers that fork from one server, which has torch imported."""
    forked.start_server()
    return run_workers(fn, n, *args, **{"start_method": "forkserver", "timeout_s": 100, **kwargs})


class Raised:
    """What an exception was, in a form that any process can read."""

    def __init__(self, error: BaseException) -> None:
        self.cls = type(error)
        self.message = str(error)
        self.cause = str(error.__cause__)
        self.attributes = {**vars(error)}
        if isinstance(error, OSError):
            self.attributes.update(errno=error.errno, filename=error.filename)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__notes__":
            raise AttributeError(name)
        try:
            return self.__dict__["attributes"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __repr__(self) -> str:
        return f"Raised({self.cls.__name__}: {self.message}, {self.attributes})"


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or a `Raised` of what it raises."""
    try:
        return call()
    except Exception as error:
        return Raised(error)


def by_every_way(rpc: Any, to: str, fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The outcomes of one call by each way of making it."""
    return {
        "rpc_sync": outcome(lambda: rpc.rpc_sync(to, fn, args)),
        "rpc_async": outcome(lambda: rpc.rpc_async(to, fn, args).wait()),
        "remote": outcome(lambda: rpc.remote(to, fn, args).to_here()),
    }
