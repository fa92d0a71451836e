"""`Resolver`, the seam between tensors and the places where their bytes are, and the one in use.

`core` has one that serves a single host; `init_rpc` installs that of the cluster.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

from mmrpc.core import mapping, memory
from mmrpc.core.location import (
    FileIdentity,
    FileLocation,
    Location,
    MemoryLocation,
    Mode,
    MountLocation,
)
from mmrpc.core.mapping import FileMapping, Mapping
from mmrpc.core.system import host
from mmrpc.errors import ConfigError, NotSharedError, StaleReferenceError

_USER: Final = re.compile(r"//[^/@]*@")


class Resolver(Protocol):
    """Turns what is mapped here into a location, and a received location into what is mapped."""

    @property
    def node(self) -> str | None:
        """Name of this node (or worker) for errors."""

    def locate(self, mapping: Mapping) -> Location:
        """Says where a mapping's bytes are, for others.

        Raises:
            NotSharedError: If nobody else can reach them.
            StaleReferenceError: If the path no longer names the mapped file.
        """

    def attach(self, location: Location, mode: Mode, needed_bytes: int) -> Mapping:
        """Gives the live mapping of a location, opened and checked, or reused and checked.

        Args:
            location: What was received. Nothing in it may be trusted.
            mode: How to map it.
            needed_bytes: Bytes that it must at least have.

        Raises:
            PathError: The subclass that fits; nothing was created or changed.
        """

    def local_path(self, url: str, *, writing: bool) -> str:
        """Gives the absolute path that a URL stands for here; nothing is looked at or copied.

        Args:
            url: Of a file or a directory, which need not exist.
            writing: Whether something is to be made there.

        Raises:
            ConfigError: If this process knows no such mount.
            PathError: If it is in no directory of this node, or in one that is not for writing.
        """

    def local_copy(self, url: str) -> str:
        """Gives the absolute path of a file that a URL names, copied to this node if need be.

        Raises:
            ConfigError: If this process knows no such mount.
            PathError: If the file is missing or cannot be copied.
        """


class HostResolver:
    """Shares files and memory between the processes of one host.

    Args:
        node: Name of this process for errors.
    """

    def __init__(self, node: str | None = None) -> None:
        self.node = node

    def locate(self, mapping: Mapping) -> Location:
        """Says where a mapping's bytes are; see `Resolver.locate`."""
        if isinstance(mapping, FileMapping):
            location = mapping.location
            if type(location) is not FileLocation:
                location = FileLocation(host.host_id(), mapping.path, mapping.identity)
                mapping.location = location
            return location
        if isinstance(mapping, memory.AnonymousMapping):
            return mapping.where()
        raise NotSharedError(
            "it is a private copy of this process",
            path=mapping.describe(),
            node=self.node,
            hint="Send the tensor itself: x.clone().",
        )

    def attach(self, location: Location, mode: Mode, needed_bytes: int) -> Mapping:
        """Maps a location of this host; see `Resolver.attach`."""
        if isinstance(location, FileLocation):
            return self.attach_file(location, mode, needed_bytes)
        if isinstance(location, MemoryLocation):
            return self.attach_memory(location, needed_bytes)
        return self._attach_mount(location, mode, needed_bytes)

    def attach_file(self, location: FileLocation, mode: Mode, needed_bytes: int) -> Mapping:
        """Maps a file of this host, if it is the one that was meant."""
        if location.host != host.host_id():
            raise NotSharedError(
                "the path is on another host (or mount namespace), and nothing shows that it is "
                "the same file here",
                path=location.path,
                node=self.node,
                hint="Put the file into a mount of the cluster's config.",
            )

        def check(found: FileIdentity, status: object) -> None:
            if found != location.identity:
                raise stale_file(location.path, self.node)

        return mapping.map_file(location.path, mode, needed_bytes, check=check, node=self.node)

    def attach_memory(self, location: MemoryLocation, needed_bytes: int) -> Mapping:
        """Maps anonymous memory of this host, while its owner lives."""
        if location.host != host.memory_host_id():
            raise NotSharedError(
                "it is the memory of another host",
                path="anonymous memory",
                node=self.node,
                hint="Give the tensor a filename in a mount that both nodes have.",
            )
        return memory.attach(location, needed_bytes, node=self.node)

    def local_path(self, url: str, *, writing: bool) -> str:
        """Refuses all URLs; see `Resolver.local_path`."""
        raise self._no_mounts(url)

    def local_copy(self, url: str) -> str:
        """Refuses all URLs; see `Resolver.local_copy`."""
        raise self._no_mounts(url)

    def _no_mounts(self, url: str) -> ConfigError:
        return ConfigError(
            f"{without_secrets(url)!r} is a URL, and this process knows no mounts",
            node=self.node,
            hint="Pass cluster= to init_rpc and name one of its mounts, or give a local path.",
        )

    def _attach_mount(self, location: MountLocation, mode: Mode, needed_bytes: int) -> Mapping:
        if location.here and location.host == host.host_id():
            # A child of a node, which has its paths but not its config.
            file = FileLocation(location.host, location.here, location.identity)
            return self.attach_file(file, mode, needed_bytes)
        raise ConfigError(
            f"the reference names the mount {location.mount!r}, and this process knows no mounts",
            node=self.node,
            hint="Pass cluster= to init_rpc.",
        )


def without_secrets(url: str) -> str:
    """The URL without user, password and query, for messages."""
    return _USER.sub("//", url.partition("?")[0], count=1)


def stale_file(path: str, node: str | None) -> StaleReferenceError:
    """The error for a path that names another file now."""
    return StaleReferenceError(
        "another file has that name now",
        path=path,
        node=node,
        hint="The file was replaced after the reference was made: send a new reference.",
    )


_resolver: Resolver = HostResolver()


def get_resolver() -> Resolver:
    """The resolver in use."""
    return _resolver


def set_resolver(resolver: Resolver | None) -> Resolver:
    """Installs a resolver, or with None the default one; gives the one before."""
    global _resolver
    before, _resolver = _resolver, resolver or HostResolver()
    return before
