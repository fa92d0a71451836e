"""Which file a descriptor is open on, so that a reference never meets another one."""

from __future__ import annotations

import hashlib
import os

from mmrpc.core.location import FileIdentity
from mmrpc.core.system import libc

_LONGEST_HANDLE = 16  # ext4, xfs and tmpfs have 8 to 12 bytes; NFS up to 128


def identify(fd: int, stat: os.stat_result | None = None) -> FileIdentity:
    """Says which file it is.

    Args:
        fd: An open descriptor.
        stat: What `os.fstat(fd)` gave, if it is at hand.
    """
    stat = stat or os.fstat(fd)
    handle = libc.file_handle(fd)
    if handle is not None:
        if len(handle) > _LONGEST_HANDLE:
            handle = hashlib.blake2b(handle, digest_size=_LONGEST_HANDLE).digest()
        return FileIdentity(stat.st_dev, stat.st_ino, b"h" + handle)
    birth = libc.birth_time_ns(fd)
    if birth is not None:
        return FileIdentity(stat.st_dev, stat.st_ino, b"b" + birth.to_bytes(8, "little"))
    changed = stat.st_ctime_ns.to_bytes(8, "little") + stat.st_size.to_bytes(8, "little")
    return FileIdentity(stat.st_dev, stat.st_ino, b"c" + changed)
