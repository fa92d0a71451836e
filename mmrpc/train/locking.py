"""One writer in a directory: a lock that ends with the process that holds it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mmrpc.core import files
from mmrpc.errors import PathError, PathExistsError

if TYPE_CHECKING:
    from filelock import BaseFileLock

_NAME = "writer.lock"


def lock(directory: str) -> BaseFileLock:
    """Takes a directory of versions for this process, until the lock is released or it ends.

    Raises:
        PathExistsError: If a server or publisher has it, of this process or another.
        PathError: If the lock cannot be made.
    """
    from filelock import FileLock, Timeout

    path = os.path.join(directory, _NAME)
    held = FileLock(path, timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise PathExistsError(
            "another parameter server or publisher writes there",
            path=directory,
            hint="Close that one, or choose another directory.",
        ) from None
    except OSError as error:
        raise files.path_error(error, path, writing=True) from None
    except NotImplementedError:
        raise PathError("its file system has no locks", path=directory) from None
    return held
