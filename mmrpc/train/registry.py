"""The parameter servers of this process, by name, and how calls from trainers find them."""

from __future__ import annotations

import threading
from typing import Any, Final

from mmrpc.errors import MmrpcError

_METHODS: Final = ("join", "push", "pull", "leave")  # of a Coordinator
_served: dict[str, object] = {}
_changed = threading.Condition()


def check_free(name: str) -> None:
    """Refuses a name that is in use.

    Raises:
        MmrpcError: If this worker has a server of that name.
    """
    if name in _served:
        raise MmrpcError(
            f"this worker has a parameter server {name!r} already",
            hint="Close it first, or give this one another name.",
        )


def serve(name: str, server: object) -> None:
    """Lets trainers find a server.

    Raises:
        MmrpcError: If this worker has one of that name.
    """
    with _changed:
        check_free(name)
        _served[name] = server
        _changed.notify_all()


def withdraw(name: str, server: object) -> None:
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
    if method not in _METHODS:
        raise MmrpcError(f"a parameter server has no method {method!r} for trainers")
    with _changed:
        if not _changed.wait_for(lambda: name in _served, wait_s):
            raise MmrpcError(
                f"there is no parameter server {name!r} on this worker",
                hint="Make it before the trainers join, or look at its log: it may have failed.",
            )
        server = _served[name]
    return getattr(server, method)(*arguments)


call.describe_call = lambda args: f"ParameterServer.{args[1]}"  # type: ignore[attr-defined]
