"""What kind of file system a path is on, and what follows from that."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mmrpc.config.models import Reader

# Served by this kernel alone: they answer, and all processes see a change at once.
_LOCAL_NAMES = (
    "bcachefs btrfs erofs exfat ext2 ext3 ext4 f2fs fuseblk hugetlbfs iso9660 jfs ntfs3 overlay "
    "ramfs reiserfs squashfs tmpfs vfat xfs zfs"
)
# Mapping works, but each fault is a round trip.
_NETWORK_NAMES = (
    "9p afs beegfs ceph cifs fuse.ceph fuse.glusterfs gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 "
    "orangefs panfs smb3 virtiofs wekafs"
)
_LOCAL = frozenset(_LOCAL_NAMES.split())
_NETWORK = frozenset(_NETWORK_NAMES.split())


class FileSystem(NamedTuple):
    """A mounted file system.

    Attributes:
        kind: Its type as the kernel calls it, such as ``ext4`` or ``fuse.sshfs``.
        source: What is mounted: a device, or the server's name and directory.
        mounted_at: Its directory.
        read_only: Whether it is mounted read-only.
    """

    kind: str
    source: str
    mounted_at: str
    read_only: bool

    @property
    def is_local(self) -> bool:
        """Whether it can neither hang nor show a change late."""
        return self.kind in _LOCAL

    @property
    def default_reader(self) -> Reader:
        """How it is best read: see ``reader`` of a mount's config."""
        if self.kind in _LOCAL:
            return "mmap"
        # FUSE servers and unknown ones may change or cut a file under its mapping.
        return "prefetch" if self.kind in _NETWORK else "copy"


UNKNOWN = FileSystem("unknown", "unknown", "/", False)


def file_system_of(path: str) -> FileSystem:
    """Says which file system an absolute path is on; may block if that does not answer."""
    with contextlib.suppress(OSError):
        os.statvfs(path)  # an automounter mounts it only when it is used
    return find_in(_mountinfo(), os.path.realpath(path))


def find_in(mountinfo: str, path: str) -> FileSystem:
    """Finds the file system of a path without symbolic links in the text of mountinfo(5)."""
    best = UNKNOWN
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(rest) < 2:
            continue
        point = _unescape(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # The last of several on one directory is the one that is seen.
        if inside and len(point) >= len(best.mounted_at):
            options = f"{fields[5]},{rest[2] if len(rest) > 2 else ''}".split(",")
            best = FileSystem(rest[0], _unescape(rest[1]), point, "ro" in options)
    return best


def _mountinfo() -> str:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
