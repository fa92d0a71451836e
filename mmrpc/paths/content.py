"""Digests of whole files, kept while the file is unchanged."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from typing import TYPE_CHECKING

from mmrpc.core.identity import identify

if TYPE_CHECKING:
    from mmrpc.core.location import FileIdentity

_KEPT = 4096


def digest_of(fd: int) -> str:
    """Computes ``sha256:…`` of a whole file; the descriptor is at its start afterwards."""
    os.lseek(fd, 0, os.SEEK_SET)
    # A duplicate has the same offset, and closing it leaves the descriptor open.
    with open(os.dup(fd), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    os.lseek(fd, 0, os.SEEK_SET)
    return f"sha256:{digest}"


class Digests:
    """Remembers the digests of files that nobody is said to write.

    Not on every file system does the time of change tell of writes through a mapping, so it
    alone is not trusted.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[FileIdentity, int, int, int], str] = OrderedDict()

    def of(self, fd: int, *, keep: bool) -> str:
        """Gives ``sha256:…`` of the file that a descriptor is open on.

        Args:
            fd: The descriptor.
            keep: Whether nobody writes to the file, so that its digest stays as it is.
        """
        status = os.fstat(fd)
        key = (identify(fd, status), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = self._known.get(key) if keep else None
        if known is None:
            known = digest_of(fd)
            if keep:
                self._known[key] = known
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
        return known
