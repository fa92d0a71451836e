"""The parameter servers of this process, by name, and how calls from trainers find them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from mmrpc.errors import MmrpcError, PathExistsError

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from mmrpc.train.coordinator import Coordinator

_served: dict[str, Coordinator] = {}
_changed = threading.Condition()


def serve(name: str, server: Coordinator) -> None:
    """Lets trainers find a server.

    Raises:
        MmrpcError: If this worker has one of that name.
    """
    with _changed:
        if name in _served:
            raise MmrpcError(
                f"this worker has a parameter server {name!r} already",
                hint="Close it first, or give this one another name.",
            )
        _served[name] = server
        _changed.notify_all()


def withdraw(name: str, server: Coordinator) -> None:
    """Lets nobody find a server any more."""
    with _changed:
        if _served.get(name) is server:
            del _served[name]


def call(name: str, method: str, arguments: tuple[Any, ...], wait_s: float = 0.0) -> Any:
    """Runs on the server's worker: calls one of its methods.

    Args:
        name: Name of the server.
        method: Name of the method.
        arguments: Its arguments.
        wait_s: Seconds to wait for a server of that name to be made.

    Raises:
        MmrpcError: If there is none.
    """
    with _changed:
        if not _changed.wait_for(lambda: name in _served, wait_s):
            raise MmrpcError(
                f"there is no parameter server {name!r} on this worker",
                hint="Make it before the trainers join, or look at its log: it may have failed.",
            )
        server = _served[name]
    return getattr(server, method)(*arguments)


call.describe_call = lambda args: f"ParameterServer.{args[1]}"  # type: ignore[attr-defined]


def lock(directory: str) -> BaseFileLock:
    """Takes the directory of a server for this process, until the lock is released or it ends.

    Raises:
        PathExistsError: If a server of another process has it.
    """
    from filelock import FileLock, Timeout

    path = os.path.join(directory, "server.lock")
    held = FileLock(path, timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise PathExistsError(
            "another parameter server uses it",
            path=directory,
            hint="End that one, or choose another directory.",
        ) from None
    return held
