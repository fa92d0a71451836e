"""Digests of whole files, kept while the file is unchanged."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict

from mmrpc.core.identity import identify
from mmrpc.core.location import FileIdentity

_KEPT = 4096


def digest_of(fd: int) -> str:
    """Computes ``sha256:…`` of a whole file, from its start."""
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


class Digests:
    """Remembers digests of files that nobody may write, as far as that can be seen.

    Times of change do not tell of writes through a mapping on every file system, so only the
    digest of a file without any write permission is kept.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[FileIdentity, int, int, int], str] = OrderedDict()

    def of(self, fd: int) -> str:
        """Gives ``sha256:…`` of the file that a descriptor is open on."""
        status = os.fstat(fd)
        key = (identify(fd, status), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = self._known.get(key)
        if known is None:
            known = digest_of(fd)
            if not status.st_mode & 0o222:
                self._known[key] = known
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
        return known
