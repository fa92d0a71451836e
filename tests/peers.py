"""Helper processes that run functions for a test: as another user, with other limits, until killed.

A peer that becomes another user imports what it needs before that, so that the checkout need not
be readable for everyone.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import importlib
import os
import pickle
import resource
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, Self

from tests import forked

NOBODY = 65534
_PR_SET_DUMPABLE = 4


class Peer:
    """A Python process that runs functions, one at a time, and sends back what they give.

    What is passed is pickled by plain pickle: a mapped tensor travels as its reference.

    Args:
        user: UID to become; None to stay the same.
        modules: Modules to import before that.
        nofile: Limit of open files; None for the inherited one.
    """

    def __init__(
        self, *, user: int | None = None, modules: Iterable[str] = (), nofile: int | None = None
    ) -> None:
        forked.start_server()
        self._pipe, theirs = forked.context.Pipe()
        arguments = (theirs, user, tuple(modules), nofile)
        self._process = forked.context.Process(target=_serve, args=arguments)
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Runs an importable function there, and gives its result or raises what it raised."""
        self.start(fn, *args)
        return self.result()

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Lets it run a function, and does not wait."""
        self._pipe.send_bytes(pickle.dumps((fn.__module__, fn.__qualname__, args)))

    def result(self) -> Any:
        """Waits for what `start` started."""
        good, value = pickle.loads(self._pipe.recv_bytes())
        if good:
            return value
        raise value

    def kill(self) -> None:
        """Ends it by SIGKILL, and waits until it is gone."""
        self._process.kill()
        self._process.join(60)

    def close(self) -> None:
        """Ends it, whatever it does."""
        self._pipe.close()
        self._process.join(5)
        self.kill()
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_both_users(body: Callable[[str], None]) -> Callable[[Peer, str], None]:
    """Makes a test of a body that takes a directory: it runs as root, and as an ordinary user."""

    def test(user: Peer, shared_dir: str) -> None:
        user.call(test, shared_dir)

    test.__name__, test.__qualname__ = body.__name__, body.__qualname__
    test.__doc__, test.__module__ = body.__doc__, body.__module__
    test.body = body
    return test


def _function(module: str, name: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return getattr(found, "body", found)


def _run(request: bytes) -> tuple[bool, Any]:
    try:
        module, name, args = pickle.loads(request)  # opens the references among the arguments
        value = _function(module, name)(*args)
        pickle.dumps(value)
    except BaseException as error:
        return False, _portable(error)
    return True, value


def become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # Changing the user makes a process opaque to /proc; one that is started as that user is not.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _serve(
    pipe: Connection, user: int | None, modules: tuple[str, ...], nofile: int | None
) -> None:
    codecs.lookup("latin1")  # found by import, which another user may not be allowed
    for module in modules:
        importlib.import_module(module)
    if nofile is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, nofile))
    if user is not None:
        become(user)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send_bytes(pickle.dumps(_run(pipe.recv_bytes())))


def _portable(error: BaseException) -> BaseException:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
        error.add_note(f"In the peer:\n{text}")
    except Exception:
        return AssertionError(text)
    return error
