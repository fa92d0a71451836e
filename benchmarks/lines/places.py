"""Where the benchmark keeps its files: a directory on disk and one in memory, gone at the end."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Places:
    """Directories for files, and names that were not used before.

    Attributes:
        disk: A directory on the disk of the temporary directory.
        memory: A directory on tmpfs.
        quick: Whether sizes are to be small.
    """

    disk: str
    memory: str
    quick: bool
    _count: list[int] = field(default_factory=lambda: [0])

    def fresh(self, directory: str) -> str:
        """A name in a directory that is not in use."""
        self._count[0] += 1
        # Each process that is given this counts for itself.
        return os.path.join(directory, f"{os.getpid()}-{self._count[0]}.bin")


@contextlib.contextmanager
def places(quick: bool) -> Iterator[Places]:
    """Makes the directories, and removes them with all that is in them."""
    with (
        tempfile.TemporaryDirectory(prefix="mmrpc-bench-") as disk,
        tempfile.TemporaryDirectory(prefix="mmrpc-bench-", dir="/dev/shm") as memory,
    ):
        yield Places(disk, memory, quick)


def remove(path: str) -> None:
    """Removes a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
