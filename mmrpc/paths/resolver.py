"""The resolver of a cluster: files in mounts by name, everything else on its own host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mmrpc.core.identity import identify
from mmrpc.core.location import FileLocation, Location, Mode, MountLocation
from mmrpc.core.mapping import FileMapping, Mapping, map_file
from mmrpc.core.resolver import HostResolver, stale_file
from mmrpc.core.system.host import host_id
from mmrpc.errors import (
    NotSharedError,
    OutsideMountsError,
    PathNotWritableError,
    StaleReferenceError,
)
from mmrpc.paths.access import MountAccess, Policy
from mmrpc.paths.content import Digests
from mmrpc.paths.locating import Locator
from mmrpc.paths.mounts import MountTable
from mmrpc.paths.proof import Proof
from mmrpc.paths.reading import map_checked
from mmrpc.paths.relative import split_relative
from mmrpc.paths.shared import SharedFiles
from mmrpc.paths.stage import Stage, cache_directory
from mmrpc.paths.verify import check_found

if TYPE_CHECKING:
    from collections.abc import Mapping as MappingType

    from mmrpc.config.cluster import ClusterConfig
    from mmrpc.core.location import FileIdentity
    from mmrpc.paths.mounts import Mount


class ClusterResolver:
    """Finds files through the mounts of this node; see `mmrpc.core.location.Resolver`.

    Args:
        table: The mounts of this node.
        proven: Name of each mount that the handshake proved, and how.
        policy: What to check and how long to wait.
        stage: Where copies of remote files are; None if no mount is remote.
        is_alone: Whether all nodes are on this host, so that nothing is ever flushed for others.

    Attributes:
        files: The files of the mounts by name.
    """

    def __init__(
        self,
        table: MountTable,
        *,
        proven: MappingType[str, Proof],
        policy: Policy | None = None,
        stage: Stage | None = None,
        is_alone: bool = False,
    ) -> None:
        self.node = table.node
        self._table = table
        self._proven = dict(proven)
        self._policy = policy or Policy()
        self._stage = stage
        self._host = HostResolver(self.node)
        self._digests = Digests()
        self._access = MountAccess(self._policy, node=self.node)
        self.files = SharedFiles(table, self._access, self._policy, stage=stage, node=self.node)
        self._locator = Locator(
            table,
            self._access,
            self._digests,
            stage=stage,
            node=self.node,
            flushes=not is_alone,
            needs_digests=self._policy.verify == "digest",
        )

    @classmethod
    def from_config(
        cls,
        cluster: ClusterConfig,
        node: str,
        *,
        proven: MappingType[str, Proof],
        is_alone: bool = False,
    ) -> ClusterResolver:
        """Makes the resolver of a node.

        Args:
            cluster: The cluster's config.
            node: Name of this node in it.
            proven: What the handshake proved.
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
                node=node,
            )
        return cls(
            table,
            proven=proven,
            policy=Policy.from_config(cluster.rpc),
            stage=stage,
            is_alone=is_alone,
        )

    def local_path(self, url: str, *, writing: bool) -> str:
        """Gives the path that a URL stands for; see `SharedFiles.local_path`."""
        return self.files.local_path(url, writing=writing)

    def local_copy(self, url: str) -> str:
        """Gives the local path of a file in a mount; see `SharedFiles.local_copy`."""
        return self.files.local_copy(url)

    def locate(self, mapping: Mapping) -> Location:
        """Says where a mapping's bytes are; see `Resolver.locate`.

        A file that was written here is flushed first, if the reference may go to another host.
        """
        if not isinstance(mapping, FileMapping):
            return self._host.locate(mapping)
        return self._locator.locate(mapping) or self._host.locate(mapping)

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
        if not is_foreign and self._is_plain(mount):
            return self._attach_plain(mount, location, mode, needed_bytes)
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

    def _is_plain(self, mount: Mount) -> bool:
        """Whether files are mapped, and looking at one cannot hang."""
        return (
            mount.reader in (None, "mmap")
            and not mount.is_mixed
            and self._access.file_system(mount).is_local
        )

    def _attach_plain(
        self, mount: Mount, location: MountLocation, mode: Mode, needed_bytes: int
    ) -> Mapping:
        """Maps a file of this host; one that is mapped already costs one `stat`.

        Not for other hosts: there, opening is what makes NFS look for changes.
        """
        path = mount.local_path(location.path)

        def opener(path: str, *, writable: bool, node: str | None) -> int:
            return self._access.open(mount, location.path, writable=writable, is_foreign=False)

        def check(found: FileIdentity, status: object) -> None:
            if found != location.identity:
                error = stale_file(path, self.node)
                error.mount = mount.name
                raise error

        return map_file(path, mode, needed_bytes, opener=opener, check=check, node=self.node)

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
