"""How the distributed tests start their workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmrpc.testing import run_workers


def run(fn: Callable[..., Any], n: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Runs a function in n workers that fork from one server, which has torch imported."""
    return run_workers(fn, n, *args, **{"start_method": "forkserver", "timeout_s": 100, **kwargs})


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns or raises, as a value."""
    try:
        return call()
    except Exception as error:
        return error


def by_every_way(rpc: Any, to: str, fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The outcomes of one call by each way of making it."""
    return {
        "rpc_sync": outcome(lambda: rpc.rpc_sync(to, fn, args)),
        "rpc_async": outcome(lambda: rpc.rpc_async(to, fn, args).wait()),
        "remote": outcome(lambda: rpc.remote(to, fn, args).to_here()),
    }
