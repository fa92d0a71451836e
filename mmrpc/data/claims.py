"""Who is writing: small files that name their process, so that those of the dead can be told."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from typing import Final

from mmrpc.core import files
from mmrpc.core.system import host
from mmrpc.errors import PathExistsError, PathNotFoundError

_TRIES: Final = 10
_MAX_BYTES: Final = 4096


def claim(path: str, what: str) -> None:
    """Takes a name for this process; the claim of a process that has died is taken over.

    Args:
        path: The name, a file.
        what: What it stands for, for the error.

    Raises:
        PathExistsError: If a living process, or one on another host, has it.
    """
    for _ in range(_TRIES):
        try:
            _write(path, replace=False)
        except PathExistsError:
            if _take_over(path, what):
                return
        else:
            return
    raise PathExistsError(f"{what} changes hands all the time", path=path, hint="Try again.")


def _write(path: str, *, replace: bool) -> None:
    mine = {"host": host.memory_host_id(), "pid": os.getpid(), "started": host.own_start_time()}
    text = json.dumps(mine).encode()
    with files.new_file(path, replace=replace) as file:
        files.write(file.fd, [memoryview(text)], len(text), path)
        file.publish()


def release(path: str) -> None:
    """Gives a name up."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _take_over(path: str, what: str) -> bool:
    """Takes a claim over if its owner has died; says whether it did, or else to look again.

    Only processes of the owner's host can know that it is dead. So a lock on the claim's own
    file, which the kernel drops with its holder, is enough to let one of them through.

    Raises:
        PathExistsError: If the owner lives, or nobody here can know.
    """
    try:
        fd = files.open_regular(path, writable=True)
    except PathNotFoundError:
        return False
    try:
        _check_dead(os.read(fd, _MAX_BYTES), path, what)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PathExistsError(
                f"{what} is being taken over by another process", path=path
            ) from None
        except OSError as error:
            raise files.path_error(error, path, writing=True) from None
        # Who had the lock before may have put its own claim in the place of this one.
        if not _is_named(fd, path):
            return False
        _write(path, replace=True)
        return True
    finally:
        os.close(fd)


def _is_named(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _check_dead(text: bytes, path: str, what: str) -> None:
    try:
        owner = json.loads(text)
        where, pid, started = str(owner["host"]), int(owner["pid"]), int(owner["started"])
    except (ValueError, KeyError, TypeError):
        raise PathExistsError(
            f"{what} is taken, and its claim is malformed",
            path=path,
            hint="Remove the file if nobody is writing.",
        ) from None
    is_here = where == host.memory_host_id()
    if is_here and not host.is_alive(pid, started):
        return
    raise PathExistsError(
        f"{what} is being written by process {pid}{'' if is_here else ' on another host'}",
        path=path,
        hint="Wait for it, or remove the file if that process has died.",
    )
