"""Who is writing: small files that name their process, so that those of the dead can be told."""

from __future__ import annotations

import contextlib
import json
import os

from mmrpc.core import files, host, sweep
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
    text = json.dumps(mine).encode()
    for _ in range(2):
        try:
            with files.new_file(path) as file:
                files.write(file.fd, [memoryview(text)], len(text), path)
                file.publish()
        except PathExistsError:
            _drop_if_dead(path, what)
        else:
            return
    raise PathExistsError(f"{what} was taken by another process just now", path=path)


def release(path: str) -> None:
    """Gives a name up."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _drop_if_dead(path: str, what: str) -> None:
    text = _read(path)
    if text is None:
        return
    try:
        owner = json.loads(text)
        where, pid, started = str(owner["host"]), int(owner["pid"]), int(owner["started"])
    except (ValueError, KeyError, TypeError):
        raise PathExistsError(
            f"{what} is taken, and its claim is malformed",
            path=path,
            hint="Remove the file if nobody is writing.",
        ) from None
    if where == host.memory_host_id() and not host.is_alive(pid, started):
        _take_away(path, text)
        return
    here = "" if where == host.memory_host_id() else " on another host"
    raise PathExistsError(
        f"{what} is being written by process {pid}{here}",
        path=path,
        hint="Wait for it, or remove the file if that process has died.",
    )


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(4096)
    except OSError:
        return None


def _take_away(path: str, text: bytes) -> None:
    """Removes a dead claim, but not one that another process put in its place meanwhile."""
    aside = sweep.part_name(path)
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if _read(aside) != text:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    release(aside)
