"""Keeps a directory of staged files within its bound.

Files go by unlink, oldest use first: whoever has one mapped keeps its bytes, and the name is
never used for other content.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

from mmrpc.core import sweep
from mmrpc.errors import NoSpaceError

NOTE_SUFFIX = ".json"
_FORGOTTEN_S = 24 * 3600.0


class _Staged(NamedTuple):
    used_ns: int
    size_bytes: int
    path: str


def make_room(
    directory: str, needed_bytes: int, limit_bytes: int | None, *, path: str, node: str | None
) -> list[str]:
    """Removes files until so many more bytes fit; the caller holds the directory's lock.

    Args:
        directory: Where the staged files are, each with a note that is touched at each use.
        needed_bytes: Size of the file that is to come.
        limit_bytes: Most that the directory may hold, parts in progress included; None for what
            its file system has.
        path: What is to come, for errors.
        node: Name of this node, for errors.

    Returns:
        Paths of what was removed.

    Raises:
        NoSpaceError: If it could not fit even into an empty directory; nothing was removed.
    """
    sweep.sweep(directory)
    staged, parts_bytes = _scan(directory)
    held_bytes = sum(file.size_bytes for file in staged)
    free_bytes = _free_bytes(directory)
    budget = free_bytes + held_bytes
    if limit_bytes is not None:
        budget = min(budget, limit_bytes - parts_bytes)
    if needed_bytes > budget:
        raise NoSpaceError(
            f"{needed_bytes:,} bytes are needed in {directory!r} and at most {max(budget, 0):,} "
            "can be made free",
            path=path,
            node=node,
            hint="Raise the node's cache_bytes, or put its cache_dir on a larger disk.",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )
    removed = []
    for file in sorted(staged):
        if held_bytes + needed_bytes <= budget:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path + NOTE_SUFFIX)
        held_bytes -= file.size_bytes
        removed.append(file.path)
    return removed


def _scan(directory: str) -> tuple[list[_Staged], int]:
    staged: list[_Staged] = []
    notes: dict[str, float] = {}
    parts_bytes = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.startswith("."):
                    parts_bytes += status.st_size
                elif entry.name.endswith(NOTE_SUFFIX):
                    notes[entry.path.removesuffix(NOTE_SUFFIX)] = status.st_mtime
                else:
                    staged.append(_Staged(_used_ns(entry.path, status), status.st_size, entry.path))
    _sweep_notes(notes, {file.path for file in staged})
    return staged, parts_bytes


def _sweep_notes(notes: dict[str, float], staged: set[str]) -> None:
    """Removes notes without a file, but for those whose file is about to get its name."""
    for path, time_s in notes.items():
        if path not in staged and time.time() - time_s > _FORGOTTEN_S:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + NOTE_SUFFIX)


def _used_ns(path: str, status: os.stat_result) -> int:
    try:
        return os.stat(path + NOTE_SUFFIX).st_mtime_ns
    except FileNotFoundError:
        return status.st_mtime_ns


def _free_bytes(directory: str) -> int:
    free = os.statvfs(directory)
    return free.f_bavail * free.f_frsize
