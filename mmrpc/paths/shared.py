"""Files of the mounts by name: where they are here, and publishing new ones."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mmrpc.core.resolver import without_secrets
from mmrpc.errors import (
    ConfigError,
    LayoutError,
    OutsideMountsError,
    PathError,
    PathNotWritableError,
    StaleReferenceError,
)
from mmrpc.paths.content import digest_of
from mmrpc.paths.publishing import publishing, read_manifest
from mmrpc.paths.relative import split_relative

if TYPE_CHECKING:
    import contextlib

    from mmrpc.paths.access import MountAccess, Policy
    from mmrpc.paths.manifest import Entry
    from mmrpc.paths.mounts import Mount, MountTable
    from mmrpc.paths.remote import Remote
    from mmrpc.paths.stage import Stage

_SCHEME = "mount://"


class SharedFiles:
    """The files of this node's mounts.

    Args:
        table: The mounts.
        access: Opens what is in local ones.
        policy: What to verify.
        stage: Where copies of remote files are, if any mount is remote.
        node: Name of this node, for errors.
    """

    def __init__(
        self,
        table: MountTable,
        access: MountAccess,
        policy: Policy,
        *,
        stage: Stage | None,
        node: str | None,
    ) -> None:
        self._table = table
        self._access = access
        self._policy = policy
        self._stage = stage
        self._node = node

    def local_copy(self, url: str) -> str:
        """Gives the local path of a file in a mount, which is staged first if it is remote.

        Args:
            url: ``mount://NAME/PATH``, which means the same on every node, or a URL below the
                root of a remote mount.

        Returns:
            An absolute path. A staged copy may be evicted later: open it soon.

        Raises:
            OutsideMountsError: If the URL is in no mount of this node.
            PathError: If the file is missing or cannot be staged.
        """
        mount, relative = self._parse(url)
        return self._local(mount, relative)

    def local_path(self, url: str, *, writing: bool) -> str:
        """Gives the path that a URL stands for on this node; nothing is looked at or copied.

        Args:
            url: ``mount://NAME/PATH``, or ``mount://NAME`` for the mount itself.
            writing: Whether something is to be made there.

        Raises:
            ConfigError: If this node has no such mount.
            OutsideMountsError: If the URL leads out of the mounts.
            PathNotWritableError: If something is to be made, and the mount is remote here, read by
                copies, or for reading only.
            PathError: If the mount is remote here.
        """
        mount, relative = self._parse(url)
        relative = relative.removesuffix("/")
        if relative:
            split_relative(relative, mount=mount.name, node=self._node)
        if writing:
            self._check_writable(mount, url)
        elif not mount.is_local:
            raise PathError(
                "the mount is remote here, and this needs the files of a directory",
                path=without_secrets(url),
                mount=mount.name,
                node=self._node,
                hint="mmrpc.open, MappedDataset and mmrpc.paths.load_tree map copies of them.",
            )
        return mount.local_path(relative) if relative else mount.root

    def _check_writable(self, mount: Mount, url: str) -> None:
        if not mount.is_local:
            reason = "the mount is remote here, and what is made here would be a copy"
            hint = f"Make it elsewhere, and publish it with mmrpc.paths.publish({mount.name!r}, …)."
        elif mount.access != "write":
            reason = "the config promises that the mount can be read, no more"
            hint = f"Set mounts.{mount.name}.access to write if all nodes may write there."
        elif mount.reader == "copy":
            reason = "this node reads the mount by copy, and maps nothing in it"
            hint = f"Set mounts.{mount.name}.reader to mmap."
        else:
            return
        raise PathNotWritableError(
            reason, path=without_secrets(url), mount=mount.name, node=self._node, hint=hint
        )

    def publish(self, mount: str, path: str) -> contextlib.AbstractContextManager[str]:
        """Gives a directory whose files other nodes see together, once the block ends.

        Args:
            mount: Name of the mount.
            path: Path of the new directory in it.

        Raises:
            ConfigError: If this node has no such mount.
            PathError: See `mmrpc.paths.publishing.publishing`.
        """
        found = self._mount(mount)
        return publishing(found, path, remote=self._remote(found), node=self._node)

    def published(self, mount: str, path: str) -> dict[str, str]:
        """Gives what was published as a directory: the name and the local path of each file.

        Raises:
            PathNotFoundError: If nothing complete is there.
            StaleReferenceError: If a file is not the one that was published.
            ConfigError: If this node has no such mount.
        """
        found = self._mount(mount)
        remote = self._remote(found)
        manifest = read_manifest(found, path, remote=remote, node=self._node)
        return {
            name: self._verified(found, f"{path}/{name}", entry)
            for name, entry in manifest.files.items()
        }

    def load_tree(self, mount: str, path: str) -> Any:
        """Maps a tree of tensors that was published as a directory, read-only.

        Args:
            mount: Name of the mount.
            path: Path of the directory in it.

        Returns:
            What `mmrpc.load_tree` gives.

        Raises:
            LayoutError: If the mount is remote here and the tree has a file for each tensor.
            PathError: As `published`.
        """
        from mmrpc.core import trees as tree

        files = self.published(mount, path)
        if tree.ARENA in files:
            return tree.load_arena(files[tree.ARENA], "r")
        if not self._mount(mount).is_local:
            raise LayoutError(
                "the mount is remote here, and the tree has a file for each tensor",
                node=self._node,
                hint="Publish it with mmrpc.save_tree(directory, tree, arena=True).",
            )
        return tree.load_tree(self._mount(mount).local_path(path), "r")

    def _parse(self, url: str) -> tuple[Mount, str]:
        if url.startswith(_SCHEME):
            name, _, relative = url.removeprefix(_SCHEME).partition("/")
            return self._mount(name), relative
        place = self._table.find_url(url)
        if place is None:
            raise OutsideMountsError(
                "it is in no mount of this node",
                path=without_secrets(url),
                node=self._node,
                hint="Add its directory to the mounts of the config.",
            )
        return place

    def _mount(self, name: str) -> Mount:
        mount = self._table.get(name)
        if mount is None:
            known = ", ".join(mount.name for mount in self._table) or "none"
            raise ConfigError(
                f"there is no mount {name!r} on this node (known: {known})", node=self._node
            )
        return mount

    def _remote(self, mount: Mount) -> Remote | None:
        if mount.is_local:
            return None
        return self._staging(mount).remote(mount)

    def _staging(self, mount: Mount) -> Stage:
        if self._stage is None:
            raise ConfigError(
                f"mount {mount.name!r} is remote, and this node has no cache_dir", node=self._node
            )
        return self._stage

    def _local(self, mount: Mount, relative: str) -> str:
        if mount.is_local:
            os.close(self._access.look(mount, relative))
            return mount.local_path(relative)
        fd, path, _ = self._staging(mount).open(mount, relative, digest=mount.is_mixed)
        os.close(fd)
        return path

    def _verified(self, mount: Mount, relative: str, entry: Entry) -> str:
        if not mount.is_local:
            fd, path, _ = self._staging(mount).open(mount, relative, expected=entry.digest)
            os.close(fd)
            return path
        fd = self._access.open(mount, relative, writable=False, is_foreign=True)
        try:
            size_bytes = os.fstat(fd).st_size
            is_same = size_bytes == entry.size_bytes
            if is_same and self._policy.verify == "digest":
                is_same = digest_of(fd) == entry.digest
        finally:
            os.close(fd)
        if not is_same:
            raise StaleReferenceError(
                "it is not the file that was published",
                path=mount.local_path(relative),
                mount=mount.name,
                node=self._node,
                hint="What is published should never be changed: publish under a new name.",
            )
        return mount.local_path(relative)
