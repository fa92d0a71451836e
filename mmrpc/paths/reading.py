"""How a checked file becomes a mapping: mapped, mapped and read ahead, or read into memory."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from mmrpc.core import files
from mmrpc.core.location import Mode
from mmrpc.core.mapping import FileMapping, map_descriptor, map_file
from mmrpc.core.system import libc
from mmrpc.errors import FileTooShortError, NoSpaceError, PathNotWritableError, StaleReferenceError

if TYPE_CHECKING:
    from mmrpc.config.models import Reader
    from mmrpc.core.location import FileIdentity

_READ_AHEAD_BYTES = 4 << 30
_COPY_BYTES = 64 << 20


def map_checked(
    fd: int,
    path: str,
    identity: FileIdentity,
    mode: Mode,
    needed_bytes: int,
    *,
    reader: Reader,
    node: str | None,
    mount: str | None,
) -> FileMapping:
    """Maps what a descriptor is open on, or finds the live mapping of that very file.

    Args:
        fd: Descriptor of the checked file; stays the caller's to close.
        path: Its absolute path on this node.
        identity: Which file it is.
        mode: How to map it.
        needed_bytes: Bytes that it must have.
        reader: How this node reads the mount.
        node: Name of this node, for errors.
        mount: Name of the mount, for errors.

    Raises:
        PathNotWritableError: If writes are to be shared, and the reader is ``copy``.
        StaleReferenceError: If the path has been given to another file meanwhile.
        PathError: If it cannot be mapped or read.
    """
    if reader == "copy":
        if mode is Mode.WRITE:
            raise PathNotWritableError(
                "this node reads the mount by copy, and writes to a copy reach nobody",
                path=path,
                mount=mount,
                node=node,
                hint=f'Open it with mode "r", or set mounts.{mount}.reader to mmap.',
            )
        return _copy(fd, path, identity, needed_bytes, node)

    opened: list[int] = []

    def opener(path: str, *, writable: bool, node: str | None) -> int:
        opened.append(os.dup(fd))
        return opened[-1]

    def check(found: FileIdentity, status: os.stat_result) -> None:
        if found != identity:
            raise StaleReferenceError(
                "another file took its name just now", path=path, mount=mount, node=node
            )

    mapping = map_file(path, mode, needed_bytes, opener=opener, check=check, node=node)
    if reader == "prefetch" and opened:
        _read_ahead(mapping)
    return mapping


def _read_ahead(mapping: FileMapping) -> None:
    if not mapping.nbytes:
        return
    # Of more than that, most would be thrown out again before it is used.
    kind = "willneed" if mapping.nbytes <= _READ_AHEAD_BYTES else "sequential"
    with contextlib.suppress(OSError):
        libc.madvise(mapping.address, mapping.nbytes, libc.ADVICE[kind])


def _copy(
    fd: int, path: str, identity: FileIdentity, needed_bytes: int, node: str | None
) -> FileMapping:
    """Reads a file into memory of this process alone; what is read later changes nothing here."""
    size_bytes = os.fstat(fd).st_size
    memory = os.memfd_create("mmrpc-copy", os.MFD_CLOEXEC)
    try:
        copied_bytes = _fill(memory, fd, size_bytes)
        if copied_bytes < max(needed_bytes, size_bytes):
            raise FileTooShortError(
                f"it ended after {copied_bytes:,} bytes while it was read",
                path=path,
                node=node,
                needed_bytes=needed_bytes,
                actual_bytes=copied_bytes,
            )
        return map_descriptor(memory, size_bytes, Mode.READ, path, identity)
    except MemoryError as error:
        raise NoSpaceError(
            f"there is no memory for a copy of {size_bytes:,} bytes",
            path=path,
            node=node,
            needed_bytes=size_bytes,
        ) from error
    except OSError as error:
        raise files.path_error(error, path, node=node) from error
    finally:
        os.close(memory)


def _fill(memory: int, fd: int, size_bytes: int) -> int:
    offset = 0
    while offset < size_bytes:
        data = os.pread(fd, min(_COPY_BYTES, size_bytes - offset), offset)
        if not data:
            break
        offset += os.write(memory, data)
    return offset
