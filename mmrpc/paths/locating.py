"""Where a mapped file is, in terms that other nodes understand."""

from __future__ import annotations

import contextvars
import os
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from mmrpc.core.identity import identify
from mmrpc.core.location import Mode, MountLocation
from mmrpc.core.resolver import stale_file
from mmrpc.core.system import libc
from mmrpc.core.system.host import host_id
from mmrpc.errors import OutsideMountsError

if TYPE_CHECKING:
    from mmrpc.core.mapping import FileMapping
    from mmrpc.paths.access import MountAccess
    from mmrpc.paths.content import Digests
    from mmrpc.paths.mounts import Mount, MountTable
    from mmrpc.paths.stage import Stage

destination: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "mmrpc_destination", default=None
)
"""`host_id()` of the receiver of the references that are made now; None if it is not known.

For one on this host, nothing has to be flushed and no digest computed.
"""


class Locator:
    """Finds the place of mapped files in the mounts of this node.

    Args:
        table: The mounts.
        access: Looks at their files.
        digests: Computes and keeps digests.
        stage: Where copies of remote files are, if any mount is remote.
        node: Name of this node, for errors.
        flushes: Whether references can go to other hosts at all.
        needs_digests: Whether others want to compare the content.
    """

    def __init__(
        self,
        table: MountTable,
        access: MountAccess,
        digests: Digests,
        *,
        stage: Stage | None,
        node: str | None,
        flushes: bool,
        needs_digests: bool,
    ) -> None:
        self._table = table
        self._access = access
        self._digests = digests
        self._stage = stage
        self._node = node
        self._flushes = flushes
        self._needs_digests = needs_digests
        self._places: WeakKeyDictionary[FileMapping, tuple[Mount, str]] = WeakKeyDictionary()

    def locate(self, mapping: FileMapping) -> MountLocation | None:
        """Gives the place of a mapped file in a mount; None if it is in none.

        What was written here is flushed first, if the reference may go to another host.

        Raises:
            PathNotFoundError: If the file has lost its name.
            StaleReferenceError: If another file has it.
        """
        origin = self._stage.origin_of(mapping.path) if self._stage else None
        if origin is not None:
            mount = self._table.get(origin.mount)
            is_mixed = mount is not None and mount.is_mixed
            content = origin.digest if is_mixed else origin.tag
            return MountLocation(
                origin.mount,
                origin.path,
                host_id(),
                mapping.identity,
                origin.size_bytes,
                content,
                _here(mapping),
            )
        found = self._place_again(mapping) or self._place(mapping)
        if found is None:
            return None
        mount, relative, size_bytes = found
        content = ""
        if self._flushes and destination.get() != host_id():
            if mapping.mode is Mode.WRITE and mapping.nbytes:
                libc.msync(mapping.address, mapping.nbytes, wait=True)
            if mount.is_mixed or self._needs_digests:
                content = self._digest(mount, relative)
        return MountLocation(
            mount.name,
            relative,
            host_id(),
            mapping.identity,
            size_bytes,
            content,
            _here(mapping),
        )

    def _place(self, mapping: FileMapping) -> tuple[Mount, str, int] | None:
        """Finds the mount, the place in it and the size of a mapped file."""
        for find in (self._table.find, self._table.find_real):
            place = find(mapping.path)
            if place is None:
                continue
            try:
                fd = self._access.look(*place)
            except OutsideMountsError:
                continue  # a symbolic link is in the path: see what is behind
            try:
                status = os.fstat(fd)
                if identify(fd, status) != mapping.identity:
                    raise stale_file(mapping.path, self._node)
            finally:
                os.close(fd)
            self._places[mapping] = place
            return *place, status.st_size
        return None

    def _place_again(self, mapping: FileMapping) -> tuple[Mount, str, int] | None:
        """Like `_place`, for one that it found before; None if it has to look closer."""
        place = self._places.get(mapping)
        if (
            place is None
            or not mapping.nbytes  # nothing is mapped that would hold the inode
            or place[0].reader == "copy"
            or not self._access.file_system(place[0]).is_local
        ):
            return None
        try:
            status = os.stat(place[0].local_path(place[1]))
        except OSError:
            return None
        # While it is mapped, nobody else gets its inode.
        return (*place, status.st_size) if mapping.is_named(status) else None

    def _digest(self, mount: Mount, relative: str) -> str:
        fd = self._access.open(mount, relative, writable=False, is_foreign=False)
        try:
            return self._digests.of(fd, keep=mount.immutable)
        finally:
            os.close(fd)


def _here(mapping: FileMapping) -> str:
    return mapping.path if destination.get() in (None, host_id()) else ""
