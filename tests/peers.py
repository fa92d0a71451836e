"""Helper processes that run functions for a test: as another user, with other limits, until killed.

A peer imports what it needs as the user who started it, and becomes the other user then, so that
the checkout need not be readable for everyone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Self

ROOT = Path(__file__).parent.parent
NOBODY = 65534
_PR_SET_DUMPABLE = 4
_PRELOADED = (
    *("pytest", "numpy", "pydantic", "mmrpc.core.refjson", "mmrpc.core.borrowed"),
    *("mmrpc.core.tensor", "mmrpc.core.standin", "torch.multiprocessing"),
)


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
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.peers"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self._process.pid
        self._send(user, tuple(modules), nofile)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Runs an importable function there, and gives its result or raises what it raised."""
        self.start(fn, *args)
        return self.result()

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Lets it run a function, and does not wait."""
        self._send(fn.__module__, fn.__qualname__, args)

    def result(self) -> Any:
        """Waits for what `start` started."""
        answer = _read(self._process.stdout)
        assert answer is not None, "the peer has ended"
        good, value = pickle.loads(answer)
        if good:
            return value
        raise value

    def kill(self) -> None:
        """Ends it by SIGKILL, and waits until it is gone."""
        self._process.kill()
        self._process.wait(60)

    def close(self) -> None:
        """Ends it, whatever it does."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, *values: Any) -> None:
        _write(self._process.stdin, values)


def _write(pipe: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(struct.pack("Q", len(data)) + data)
    pipe.flush()


def _read(pipe: BinaryIO) -> bytes | None:
    """The next message, still pickled; None after the last one."""
    header = pipe.read(8)
    if len(header) < 8:
        return None
    (length,) = struct.unpack("Q", header)
    data = pipe.read(length)
    return data if len(data) == length else None


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


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # Changing the user makes a process opaque to /proc; one that is started as that user is not.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _serve() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what is printed must not get between the answers
    user, modules, nofile = pickle.loads(_read(requests))
    for module in (*_PRELOADED, *modules):
        importlib.import_module(module)
    if nofile is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, nofile))
    if user is not None:
        _become(user)
    while (request := _read(requests)) is not None:
        _write(answers, _run(request))


def _portable(error: BaseException) -> BaseException:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
        error.add_note(f"In the peer:\n{text}")
    except Exception:
        return AssertionError(text)
    return error


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve()
