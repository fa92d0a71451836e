"""Where the bytes of a tensor are: what a reference carries instead of them. Pure data.

Which local file a received location means, and whether this node may open it, is for a
`mmrpc.core.resolver.Resolver` to say.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Mode(enum.StrEnum):
    """How a file is mapped."""

    READ = "r"
    """Copy-on-write: writes stay in this process."""
    WRITE = "r+"
    """Shared: writes reach the file and everyone who maps it."""

    __hash__ = str.__hash__  # in C; that of `enum` is not


class FileIdentity(NamedTuple):
    """Which file it is, rather than what it is called.

    Device and inode alone do not do: a deleted file's pair is given to the next one created.

    Attributes:
        device: ``st_dev``; means something on one host only.
        inode: ``st_ino``.
        generation: What tells two users of one inode apart: ``h`` and the file handle of
            `name_to_handle_at(2)`, else ``b`` and the birth time in nanoseconds, else ``c`` and
            the time of the last change with the size, which is weak.
    """

    device: int
    inode: int
    generation: bytes

    @property
    def is_strong(self) -> bool:
        """Whether a file that takes over the inode is certain to differ."""
        return not self.generation.startswith(b"c")


@dataclass(frozen=True, slots=True)
class FileLocation:
    """A file, by its absolute path on one host.

    Attributes:
        host: `mmrpc.core.system.host.host_id()` of the host.
        path: Absolute path there.
        identity: The file that was meant.
    """

    host: str
    path: str
    identity: FileIdentity


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """A piece of anonymous memory, by a descriptor of the process that owns it.

    Attributes:
        host: `mmrpc.core.system.host.memory_host_id()` of the host; PIDs mean something there only.
        pid: The owner.
        started: Start time of the owner in clock ticks since boot, since PIDs are reused.
        fd: Descriptor number in the owner.
        inode: Inode of the memory file, to know that the descriptor still is that one.
    """

    host: str
    pid: int
    started: int
    fd: int
    inode: int


@dataclass(frozen=True, slots=True)
class MountLocation:
    """A file, by its place in a named mount that each node has somewhere.

    Attributes:
        mount: Name of the mount in the cluster's config.
        path: Relative path in it, with ``/`` between its parts.
        host: `host_id()` of the sender: there, `identity` holds in full.
        identity: The file that was meant.
        size_bytes: Size when the reference was made.
        content: Identity of the content where the file's own does not compare between
            nodes: ``sha256:…``, an ETag or a version, or empty.
        here: Absolute path on the sender's host, for processes there that know no mounts, such
            as the workers of a DataLoader; means nothing elsewhere.
    """

    mount: str
    path: str
    host: str
    identity: FileIdentity
    size_bytes: int
    content: str = ""
    here: str = ""


Location = FileLocation | MemoryLocation | MountLocation
