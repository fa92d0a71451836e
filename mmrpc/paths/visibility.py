"""Wait for a file that another host has made and this one does not see yet.

NFS remembers for up to a minute that a name did not exist. Listing the directory above makes it
look again, and so the nearest ancestor that exists is listed before each new try.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, TypeVar

from mmrpc.errors import PathNotFoundError, StaleReferenceError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 2.0


def until_visible(find: Callable[[], T], *, root: str, relative: str, timeout_s: float) -> T:
    """Calls `find` until it finds the file, or the time is over.

    Args:
        find: Opens the file, or raises.
        root: Directory of the mount.
        relative: Path of the file in it.
        timeout_s: Seconds to go on trying; 0 for one try.

    Raises:
        PathNotFoundError: If it stayed away, saying for how long.
        PathError: Whatever else `find` raises.
    """
    deadline = time.monotonic() + timeout_s
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            return find()
        except (PathNotFoundError, StaleReferenceError) as error:
            left_s = deadline - time.monotonic()
            # ESTALE is NFS's word for a handle that is gone: the name may have a new one.
            if isinstance(error, StaleReferenceError) and not _is_estale(error):
                raise
            if left_s <= 0:
                if timeout_s and isinstance(error, PathNotFoundError):
                    error.reason += f", {timeout_s:g} s after the reference came"
                raise
            time.sleep(min(wait_s, left_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            look_again(root, relative)


def look_again(root: str, relative: str) -> None:
    """Lists the nearest existing directory on the way to a file."""
    parts = relative.split("/")[:-1]
    for count in range(len(parts), -1, -1):
        with contextlib.suppress(OSError):
            os.listdir("/".join((root.rstrip("/") or "/", *parts[:count])))
            return


def _is_estale(error: StaleReferenceError) -> bool:
    return isinstance(error.__cause__, OSError)
