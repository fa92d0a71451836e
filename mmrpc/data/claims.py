"""Who is writing: small files that name their process, so that those of the dead can be told."""

from __future__ import annotations

import contextlib
import json
import os

from mmrpc.core import files, host
from mmrpc.errors import PathExistsError


def claim(path: str, what: str) -> None:
    """Takes a name for this process; the claim of a process that has died is taken over.

    Args:
        path: The name, a file.
        what: What it stands for, for the error.

    Raises:
        PathExistsError: If a living process, or one on another host, has it.
    """
    mine = {"host": host.memory_host_id(), "pid": os.getpid(), "started": host.own_start_time()}
    for _ in range(2):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            _drop_if_dead(path, what)
        except OSError as error:
            raise files.path_error(error, path, writing=True) from None
        else:
            with os.fdopen(fd, "w") as file:
                json.dump(mine, file)
            return
    raise PathExistsError(f"{what} was taken by another process just now", path=path)


def release(path: str) -> None:
    """Gives a name up."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _drop_if_dead(path: str, what: str) -> None:
    try:
        with open(path) as file:
            owner = json.load(file)
        pid, started = int(owner["pid"]), int(owner["started"])
        where = owner["host"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        raise PathExistsError(
            f"{what} is taken, and its claim is malformed",
            path=path,
            hint="Remove the file if nobody is writing.",
        ) from None
    if where == host.memory_host_id() and not host.is_alive(pid, started):
        release(path)
        return
    here = "" if where == host.memory_host_id() else " on another host"
    raise PathExistsError(
        f"{what} is being written by process {pid}{here}",
        path=path,
        hint="Wait for it, or remove the file if that process has died.",
    )
