"""The resolver of a cluster: files in mounts by name, everything else on its own host."""

from __future__ import annotations

import contextlib
import contextvars
import os
from typing import TYPE_CHECKING

from mmrpc.core import libc
from mmrpc.core.host import host_id
from mmrpc.core.identity import identify
from mmrpc.core.location import FileLocation, Location, Mode, MountLocation
from mmrpc.core.mapping import FileMapping, Mapping
from mmrpc.core.resolver import HostResolver, stale_file
from mmrpc.errors import (
    NotSharedError,
    OutsideMountsError,
    PathNotWritableError,
    StaleReferenceError,
)
from mmrpc.paths.access import MountAccess, Policy
from mmrpc.paths.content import Digests
from mmrpc.paths.mounts import MountTable
from mmrpc.paths.proof import Proof
from mmrpc.paths.reading import map_checked
from mmrpc.paths.relative import split_relative
from mmrpc.paths.stage import Stage, cache_directory
from mmrpc.paths.verify import check_found

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Mapping as MappingType

    from mmrpc.config.cluster import ClusterConfig
    from mmrpc.paths.mounts import Mount

_destination: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "mmrpc_destination", default=None
)


@contextlib.contextmanager
def sending_to(host: str | None) -> Iterator[None]:
    """Says for which host the references made in this block are.

    For one on this host, nothing has to be flushed and no digest computed.

    Args:
        host: `host_id()` of the receiver; None if it is not known.
    """
    token = _destination.set(host)
    try:
        yield
    finally:
        _destination.reset(token)


class ClusterResolver:
    """Finds files through the mounts of this node; see `mmrpc.core.location.Resolver`.

    Args:
        table: The mounts of this node.
        proven: Name of each mount that the handshake proved, and how.
        policy: What to check and how long to wait.
        stage: Where copies of remote files are; None if no mount is remote.
        node: Name of this node (or worker) for errors; by default the table's.
        is_alone: Whether all nodes are on this host, so that nothing is ever flushed for others.
    """

    def __init__(
        self,
        table: MountTable,
        *,
        proven: MappingType[str, Proof],
        policy: Policy | None = None,
        stage: Stage | None = None,
        node: str | None = None,
        is_alone: bool = False,
    ) -> None:
        self.node = node or table.node
        self._table = table
        self._proven = dict(proven)
        self._policy = policy or Policy()
        self._stage = stage
        self._is_alone = is_alone
        self._host = HostResolver(self.node)
        self._digests = Digests()
        self._access = MountAccess(self._policy, node=self.node)

    @classmethod
    def from_config(
        cls,
        cluster: ClusterConfig,
        node: str,
        *,
        proven: MappingType[str, Proof],
        worker: str | None = None,
        is_alone: bool = False,
    ) -> ClusterResolver:
        """Makes the resolver of a node.

        Args:
            cluster: The cluster's config.
            node: Name of this node in it.
            proven: What the handshake proved.
            worker: Name of this process, which errors then name instead of the node.
            is_alone: Whether all nodes are on this host.

        Raises:
            ConfigError: If a mount is remote here and the node has no place for copies.
        """
        table = MountTable.from_config(cluster, node)
        config = cluster.nodes[node]
        stage = None
        if not all(mount.is_local for mount in table):
            stage = Stage(
                cache_directory(config.cache_dir, node),
                limit_bytes=config.cache_bytes,
                node=worker or node,
            )
        return cls(
            table,
            proven=proven,
            policy=Policy.from_config(cluster.rpc),
            stage=stage,
            node=worker or node,
            is_alone=is_alone,
        )

    def locate(self, mapping: Mapping) -> Location:
        """Says where a mapping's bytes are; see `Resolver.locate`.

        A file that was written here is flushed first, if the reference may go to another host.
        """
        if not isinstance(mapping, FileMapping):
            return self._host.locate(mapping)
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
            )
        place = self._table.find(mapping.path)
        if place is not None:
            location = self._locate_in(*place, mapping)
            if location is not None:
                return location
        place = self._table.find_real(mapping.path)
        location = self._locate_in(*place, mapping) if place else None
        return location or self._host.locate(mapping)

    def _locate_in(self, mount: Mount, relative: str, mapping: FileMapping) -> MountLocation | None:
        """Gives the place of a mapped file in a mount; None if a symbolic link leads there."""
        try:
            fd = self._access.look(mount, relative)
        except OutsideMountsError:
            return None
        try:
            status = os.fstat(fd)
            if identify(fd, status) != mapping.identity:
                raise stale_file(mapping.path, self.node)
        finally:
            os.close(fd)
        content = ""
        if not self._stays_here():
            if mapping.mode is Mode.WRITE and mapping.nbytes:
                libc.msync(mapping.address, mapping.nbytes, wait=True)
            if mount.is_mixed or self._policy.verify == "digest":
                content = self._digest(mount, relative)
        return MountLocation(
            mount.name, relative, host_id(), mapping.identity, status.st_size, content
        )

    def _stays_here(self) -> bool:
        return self._is_alone or _destination.get() == host_id()

    def _digest(self, mount: Mount, relative: str) -> str:
        fd = self._access.open(mount, relative, writable=False, is_foreign=False)
        try:
            return self._digests.of(fd, keep=mount.immutable)
        finally:
            os.close(fd)

    def attach(self, location: Location, mode: Mode, needed_bytes: int) -> Mapping:
        """Maps a received location; see `Resolver.attach`."""
        if isinstance(location, MountLocation):
            return self._attach_mount(location, mode, needed_bytes)
        if isinstance(location, FileLocation):
            if location.host != host_id():
                raise NotSharedError(
                    "it is on another host, outside the mounts",
                    path=location.path,
                    node=self.node,
                    hint=self._would_do(),
                )
            if not self._policy.same_host_paths:
                return self._attach_inside(location, mode, needed_bytes)
        return self._host.attach(location, mode, needed_bytes)

    def _would_do(self) -> str:
        """Names a mount that would have made a tensor reachable."""
        usable = [m for m in self._table if m.is_local and self._proof(m) is not None]
        # A tensor is made by writing it somewhere, so one for writing is the better advice.
        usable.sort(key=lambda mount: mount.access != "write")
        if not usable:
            return "Put it into a mount that both nodes have; none is proven yet."
        return f"Make it in the mount {usable[0].name!r}, which is {usable[0].root!r} on this node."

    def _attach_inside(self, location: FileLocation, mode: Mode, needed_bytes: int) -> Mapping:
        place = self._table.find(location.path)
        if place is None:
            raise OutsideMountsError(
                "it is in no mount of this node",
                path=location.path,
                node=self.node,
                hint="Put it into one, or set rpc.same_host_paths to true.",
            )
        mount, relative = place
        inside = MountLocation(mount.name, relative, location.host, location.identity, needed_bytes)
        return self._attach_mount(inside, mode, needed_bytes)

    def _attach_mount(self, location: MountLocation, mode: Mode, needed_bytes: int) -> Mapping:
        mount = self._table.get(location.mount)
        if mount is None:
            raise NotSharedError(
                "this node has no mount of that name",
                path=location.path,
                mount=location.mount,
                node=self.node,
                hint=f"Say where it is in nodes.{self.node}.mounts.{location.mount}.",
            )
        split_relative(location.path, mount=mount.name, node=self.node)
        if not mount.is_local:
            return self._attach_remote(mount, location, mode, needed_bytes)
        is_foreign = location.host != host_id()
        proof = self._proof(mount) if is_foreign else None
        if is_foreign and proof is None:
            raise NotSharedError(
                "nothing proves that the mount holds the same files on both hosts",
                path=mount.local_path(location.path),
                mount=mount.name,
                node=self.node,
                hint=f"Set mounts.{mount.name}.trust to declared if you know that it does.",
            )
        fd = self._access.open(
            mount, location.path, writable=mode is Mode.WRITE, is_foreign=is_foreign
        )
        try:
            status = os.fstat(fd)
            identity = identify(fd, status)
            path = mount.local_path(location.path)
            check_found(
                location,
                identity,
                status,
                needed_bytes,
                path=path,
                node=self.node,
                proof=proof,
                verify=self._policy.verify,
                is_mixed=mount.is_mixed,
                digest=lambda: self._digests.of(fd, keep=mount.immutable),
            )
            reader = mount.reader or (
                # Shared writes need a mapping; a default must not forbid them.
                "mmap" if mode is Mode.WRITE else self._access.file_system(mount).default_reader
            )
            return map_checked(
                fd,
                path,
                identity,
                mode,
                needed_bytes,
                reader=reader,
                node=self.node,
                mount=mount.name,
            )
        finally:
            os.close(fd)

    def _attach_remote(
        self, mount: Mount, location: MountLocation, mode: Mode, needed_bytes: int
    ) -> Mapping:
        if mode is Mode.WRITE:
            raise PathNotWritableError(
                "the mount is remote here, and writes to a copy of an object reach nobody",
                path=location.path,
                mount=mount.name,
                node=self.node,
                hint='Send it opened with mode "r".',
            )
        if self._stage is None:
            raise NotSharedError(
                "the mount is remote here, and this node has no cache_dir",
                path=location.path,
                mount=mount.name,
                node=self.node,
                hint=f"Set nodes.{self.node}.cache_dir.",
            )
        if not location.content and not mount.immutable:
            raise StaleReferenceError(
                "the reference does not say which version of the object was meant",
                path=location.path,
                mount=mount.name,
                node=self.node,
            )
        fd, path, origin = self._stage.open(
            mount,
            location.path,
            expected=location.content,
            digest=mount.is_mixed,
        )
        try:
            if origin.size_bytes != location.size_bytes:
                raise StaleReferenceError(
                    f"it has {origin.size_bytes:,} bytes, and {location.size_bytes:,} were meant",
                    path=f"{mount.name}/{location.path}",
                    mount=mount.name,
                    node=self.node,
                )
            return map_checked(
                fd,
                path,
                identify(fd),
                mode,
                needed_bytes,
                reader=mount.reader or "mmap",
                node=self.node,
                mount=mount.name,
            )
        finally:
            os.close(fd)

    def _proof(self, mount: Mount) -> Proof | None:
        proof = self._proven.get(mount.name)
        if proof is None and mount.trust == "declared":
            return Proof(mount.name, "declared")
        return proof
