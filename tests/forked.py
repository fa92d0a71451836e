"""Processes that fork from one server, which has torch loaded: an import costs each a second.

`Forked` runs one function, in namespaces of its own if it is to be like another host.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any, Self

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWPID = 0x20000, 0x20000000
LIFETIME_S = 100
"""Nobody waits longer for such a process; it ends then, also if its test was killed."""

context = multiprocessing.get_context("forkserver")
_libc = ctypes.CDLL(None, use_errno=True)


def start_server() -> None:
    """Starts the server if it does not run, with all loaded that any test forks for.

    What asks for a server first says what it loads, so that this comes before other ways to ask.
    """
    context.set_forkserver_preload(
        [
            *("pytest", "numpy", "pydantic", "torch.multiprocessing", "encodings.latin_1"),
            "torch._dynamo",  # what an optimizer imports, in twice the time of torch itself
            *("mmrpc.core.refjson", "mmrpc.core.borrowed", "mmrpc.core.tensor"),
            *("mmrpc.core.standin", "mmrpc.rpc"),
        ]
    )
    forkserver.ensure_running()


class Forked:
    """A process that runs one function; as a context manager, it is killed at the end.

    Args:
        function: An importable function. It and what it returns are pickled.
        *args: Its arguments.
        mounts: Whether what it mounts is seen by itself only.
        pids: Whether it sees only processes that it starts; takes `mounts`.
    """

    def __init__(
        self, function: Callable[..., Any], *args: Any, mounts: bool = False, pids: bool = False
    ) -> None:
        start_server()
        self._answers, answers = context.Pipe(duplex=False)
        namespaces = (_CLONE_NEWNS if mounts else 0) | (_CLONE_NEWPID if pids else 0)
        # The server has the environment that it was started with, and not what came since.
        told = (answers, dict(os.environ), namespaces, function, args)
        self._process = context.Process(target=_run, args=told)
        self._process.start()
        answers.close()

    def result(self) -> Any:
        """Waits for its end, and gives what the function returned; fails with what it raised."""
        if not self._answers.poll(LIFETIME_S):
            raise AssertionError(f"still running after {LIFETIME_S} s")
        try:
            has_returned, value = self._answers.recv()
        except EOFError:
            self._process.join()
            raise AssertionError(f"ended with {self._process.exitcode}") from None
        assert has_returned, value
        self._process.join(LIFETIME_S)
        assert self._process.exitcode == 0
        return value

    def kill(self) -> None:
        """Ends it by SIGKILL, and waits until it is gone."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.close()
        self._answers.close()


def _run(
    answers: Any,
    environment: dict[str, str],
    namespaces: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    signal.alarm(LIFETIME_S)
    os.environ.clear()
    os.environ.update(environment)
    try:
        if namespaces:
            _enter(namespaces)
        answers.send((True, function(*args)))
    except BaseException:
        answers.send((False, traceback.format_exc()))


def _enter(namespaces: int) -> None:
    """Goes on in namespaces of its own; for PIDs it is a child that does, which dies with us."""
    _unshare(_CLONE_NEWNS)
    mount("--make-rprivate", "/")
    if namespaces & _CLONE_NEWPID:
        _unshare(_CLONE_NEWPID)  # its first child is the one without which it can have no other
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        end_with_parent()
        mount("-t", "proc", "proc", "/proc")


def _unshare(namespace: int) -> None:
    if _libc.unshare(namespace):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def end_with_parent() -> None:
    """Lets the kernel kill this process when its parent ends; a change of user forgets that."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def mount(*arguments: str) -> None:
    """Mounts something, for all that share the namespace."""
    subprocess.run(["mount", *arguments], check=True, timeout=30)
