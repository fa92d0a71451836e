"""The mounts of one node: where each named one is here, and which file belongs to which."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mmrpc.paths import relative as relative_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mmrpc.config.cluster import ClusterConfig
    from mmrpc.config.models import Reader


@dataclass(frozen=True, slots=True)
class Mount:
    """A named mount, as one node has it.

    Attributes:
        name: Its name in the cluster's config.
        root: An absolute path, or a URL that fsspec serves.
        access: What the config promises that every node can do.
        reader: How this node reads it; None for what suits the file system.
        trust: ``declared`` if the config vouches for it.
        immutable: Whether its files never change.
        is_mixed: Whether it is a directory on some nodes and remote on others, which can compare
            nothing but the content.
    """

    name: str
    root: str
    access: Literal["read", "write"] = "read"
    reader: Reader | None = None
    trust: Literal["proven", "declared"] = "proven"
    immutable: bool = False
    is_mixed: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it is a directory here, rather than behind a URL."""
        return self.root.startswith("/")

    def local_path(self, relative: str) -> str:
        """Gives the absolute path of a file in a local mount; the text is not checked."""
        return f"{self.root.rstrip('/')}/{relative}"


class MountTable:
    """All mounts of one node.

    Args:
        mounts: The mounts; no two may have one name.
        node: Name of the node, for errors.
    """

    def __init__(self, mounts: Iterable[Mount], *, node: str | None = None) -> None:
        self.node = node
        self._mounts: dict[str, Mount] = {}
        for mount in mounts:
            if mount.name in self._mounts:
                raise ValueError(f"two mounts are called {mount.name!r}")
            self._mounts[mount.name] = mount
        self._real_roots: dict[str, str] = {}

    @classmethod
    def from_config(cls, cluster: ClusterConfig, node: str) -> MountTable:
        """Reads the mounts of a node from the cluster's config."""
        mounts = []
        for name, root in cluster.nodes[node].mounts.items():
            config = cluster.mounts[name]
            roots = [n.mounts[name] for n in cluster.nodes.values() if name in n.mounts]
            is_mixed = len({other.startswith("/") for other in roots}) > 1
            mounts.append(
                Mount(
                    name,
                    root,
                    config.access,
                    config.reader,
                    config.trust,
                    config.immutable,
                    is_mixed,
                )
            )
        return cls(mounts, node=node)

    def __iter__(self) -> Iterator[Mount]:
        return iter(self._mounts.values())

    def __len__(self) -> int:
        return len(self._mounts)

    def get(self, name: str) -> Mount | None:
        """Gives the mount of that name, if this node has it."""
        return self._mounts.get(name)

    def find(self, path: str) -> tuple[Mount, str] | None:
        """Finds the local mount that a path belongs to by its text: the one with longest root.

        Args:
            path: Absolute path on this node.

        Returns:
            The mount and the path relative to it, if that could be sent; else None.
        """
        return self._longest(path, lambda mount: mount.root if mount.is_local else None)

    def find_url(self, url: str) -> tuple[Mount, str] | None:
        """Finds the remote mount that a URL belongs to, in the same way."""
        return self._longest(url, lambda mount: None if mount.is_local else mount.root)

    def find_real(self, path: str) -> tuple[Mount, str] | None:
        """Like `find`, but sees through symbolic links, in the path and in the roots.

        It looks at the file system, and so may block.
        """
        return self._longest(os.path.realpath(path), self._real_root)

    def _longest(
        self, path: str, root_of: Callable[[Mount], str | None]
    ) -> tuple[Mount, str] | None:
        best: tuple[Mount, str] | None = None
        longest = -1
        for mount in self:
            root = root_of(mount)
            if root is None:
                continue
            prefix = root.rstrip("/") + "/"
            if path.startswith(prefix) and len(prefix) > longest:
                best, longest = (mount, path[len(prefix) :]), len(prefix)
        return best if best and relative_paths.is_relative(best[1]) else None

    def _real_root(self, mount: Mount) -> str | None:
        if not mount.is_local:
            return None
        real = self._real_roots.get(mount.name)
        if real is None:
            real = self._real_roots[mount.name] = os.path.realpath(mount.root)
        return real
