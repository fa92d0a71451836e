"""Temporary names of files in the making, and the removal of those whose maker has died.

A name says who made it: host, PID and start time. So anyone on that host can tell a file that
is being written from one that nobody will ever finish.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from typing import Final

from mmrpc.core.system import host

_PART = re.compile(r"\.mmrpc-(?P<host>[0-9a-f]{16})-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]+\.part")
_OTHER_HOST_S: Final = 24 * 3600.0  # of another host's maker we know only the age

_swept: set[str] = set()


def part_name(path: str) -> str:
    """A temporary name in the directory of `path`, so that a rename stays in one file system."""
    name = (
        f".mmrpc-{host.memory_host_id()}-{os.getpid()}-{host.own_start_time()}"
        f"-{secrets.token_hex(4)}.part"
    )
    return os.path.join(os.path.dirname(path), name)


def is_stale(path: str) -> bool:
    """Whether it is a temporary file that nobody will finish."""
    match = _PART.fullmatch(os.path.basename(path))
    if match is None:
        return False
    if match["host"] == host.memory_host_id():
        return not host.is_alive(int(match["pid"]), int(match["started"]))
    try:
        return time.time() - os.lstat(path).st_mtime > _OTHER_HOST_S
    except OSError:
        return False


def sweep(directory: str) -> list[str]:
    """Removes stale temporary files from a directory; gives their names.

    Names that are not ours, or whose maker lives, are left alone, and so is what may not be
    removed.
    """
    removed = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if is_stale(entry.path):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    removed.append(entry.name)
    return removed


def sweep_once(directory: str) -> None:
    """Sweeps a directory the first time that this process asks for it."""
    if directory not in _swept:
        _swept.add(directory)
        sweep(directory)
