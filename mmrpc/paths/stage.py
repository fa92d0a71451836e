"""Remote objects as complete local files: staged once per node, whoever asks for them.

A staged file is named by what it holds (mount, path and version of the object), appears
complete or not at all, and is never written again. A lock per name saves double work; that the
result is right does not depend on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mmrpc.core import files, sweep
from mmrpc.errors import ConfigError, PathNotFoundError, StaleReferenceError
from mmrpc.paths import evict
from mmrpc.paths.content import digest_of
from mmrpc.paths.fstype import file_system_of
from mmrpc.paths.progress import Report, callback
from mmrpc.paths.relative import split_relative
from mmrpc.paths.remote import ObjectInfo, Remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mmrpc.paths.mounts import Mount

_TRIES = 3
_LONGEST_SUFFIX = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """What a staged file is a copy of.

    Attributes:
        mount: Name of the mount.
        path: Path in the mount.
        size_bytes: Size of the object.
        tag: Which version of the object it is; see `mmrpc.paths.remote.ObjectInfo`.
        digest: ``sha256:…`` of the content, or empty if nobody has asked for it.
    """

    mount: str
    path: str
    size_bytes: int
    tag: str
    digest: str = ""


class Stage:
    """The staged files of one node.

    Args:
        cache_dir: A directory on the node's own disk, made if it is missing; all processes of
            the node share it.
        limit_bytes: Most that the files may take together.
        node: Name of the node, for errors.
        report: Called as long downloads go on.
    """

    def __init__(
        self,
        cache_dir: str,
        *,
        limit_bytes: int | None = None,
        node: str | None = None,
        report: Callable[[Report], object] | None = None,
    ) -> None:
        self.node = node
        self._limit_bytes = limit_bytes
        self._report = report
        self._objects = os.path.join(cache_dir, "objects")
        self._locks = os.path.join(cache_dir, "locks")
        self._remotes: dict[tuple[int, Mount], Remote] = {}
        self._origins: dict[str, Origin] = {}

    def remote(self, mount: Mount) -> Remote:
        """Gives this process's client of a mount."""
        # A client made before a fork has no event loop in the child.
        key = (os.getpid(), mount)
        remote = self._remotes.get(key)
        if remote is None:
            remote = self._remotes[key] = Remote(mount, node=self.node)
        return remote

    def open(
        self, mount: Mount, relative: str, *, expected: str = "", digest: bool = False
    ) -> tuple[int, str, Origin]:
        """Opens the local copy of an object, which is downloaded if it is not there.

        Args:
            mount: A remote mount.
            relative: Path in it, from an untrusted source.
            expected: Tag or ``sha256:…`` of the version that is wanted; empty for what the
                server has now.
            digest: Whether the digest must be known.

        Returns:
            A descriptor (the caller's to close), the path of the copy, and what it is a copy of.

        Raises:
            StaleReferenceError: If the server has another version than the expected one.
            NoSpaceError: If it cannot fit into the cache.
            PathError: If the server does not have it or does not give it.
        """
        split_relative(relative, mount=mount.name, node=self.node)
        self._make_directories()
        remote = self.remote(mount)
        by_tag = expected and not expected.startswith("sha256:")
        for _ in range(_TRIES):
            # With the tag the name is known: a copy that is here needs no word from the server.
            found = self._find(remote, relative, expected) if by_tag else None
            if found is None:
                info = self._ask(remote, relative, expected if by_tag else "")
                path = self._name(remote, relative, info.tag)
                found = self._find(remote, relative, info.tag) or self._stage(
                    remote, relative, info, path
                )
            if found is not None:
                return self._checked(*found, expected=expected, digest=digest)
        raise StaleReferenceError(
            f"it changed during each of {_TRIES} downloads",
            path=remote.url(relative),
            mount=mount.name,
            node=self.node,
            hint="Publish new content under a new name.",
        )

    def origin_of(self, path: str) -> Origin | None:
        """Says what a local path is the staged copy of, also if it is gone by now."""
        if os.path.dirname(path) != self._objects:
            return None
        return self._origins.get(path) or self._read_note(path)

    def _make_directories(self) -> None:
        try:
            for directory in (self._objects, self._locks):
                os.makedirs(directory, mode=0o700, exist_ok=True)
        except OSError as error:
            raise files.path_error(error, self._objects, node=self.node, writing=True) from None

    def _ask(self, remote: Remote, relative: str, expected_tag: str) -> ObjectInfo:
        info = remote.info(relative)
        about = {"path": remote.url(relative), "mount": remote.mount.name, "node": self.node}
        if not info.tag and not remote.mount.immutable:
            raise StaleReferenceError(
                "the server gives neither a version, an ETag nor a time for it, so a copy could "
                "be out of date",
                hint=f"Declare mounts.{remote.mount.name}.immutable if its files never change.",
                **about,
            )
        if expected_tag and info.tag != expected_tag:
            raise StaleReferenceError(
                f"the server now has another version ({info.tag}) than was meant ({expected_tag})",
                hint="It was replaced after the reference was made: send a new reference.",
                **about,
            )
        return info

    def _name(self, remote: Remote, relative: str, tag: str) -> str:
        mount = remote.mount
        key = json.dumps([mount.name, mount.root, remote.endpoint, relative, tag])
        suffix = os.path.splitext(relative)[1]
        if len(suffix) > _LONGEST_SUFFIX or not suffix[1:].isalnum() or suffix == evict.NOTE_SUFFIX:
            suffix = ""
        name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        return os.path.join(self._objects, name + suffix)

    def _find(self, remote: Remote, relative: str, tag: str) -> tuple[int, str, Origin] | None:
        path = self._name(remote, relative, tag)
        origin = self._read_note(path)
        if origin is None:
            return None
        try:
            fd = files.open_regular(path, node=self.node)
        except PathNotFoundError:
            return None
        if os.fstat(fd).st_size != origin.size_bytes:
            # Somebody else cut it, for we never write here: what is left is of no use.
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path + evict.NOTE_SUFFIX)
        return fd, path, origin

    def _stage(
        self, remote: Remote, relative: str, info: ObjectInfo, path: str
    ) -> tuple[int, str, Origin] | None:
        """Downloads one version, unless another process did; None if it changed meanwhile."""
        # Two digits of the name: the lock files stay, and there should not be one per object.
        with self._lock(os.path.basename(path)[:2]):
            found = self._find(remote, relative, info.tag)
            if found is not None:
                return found
            with self._lock("eviction"):
                evict.make_room(
                    self._objects,
                    info.size_bytes,
                    self._limit_bytes,
                    path=remote.url(relative),
                    node=self.node,
                )
            part = sweep.part_name(path)
            try:
                remote.get(
                    relative,
                    part,
                    callback(remote.mount.name, relative, info.size_bytes, self._report),
                )
                if remote.info(relative) != info or os.stat(part).st_size != info.size_bytes:
                    return None
                origin = Origin(remote.mount.name, relative, info.size_bytes, info.tag)
                self._write_note(path, origin)
                os.chmod(part, 0o444)
                fd = self._publish(part, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)
            return fd, path, origin

    def _publish(self, part: str, path: str) -> int:
        # Opened before it has its name: another process may evict it at any time after.
        fd = files.open_regular(part, node=self.node)
        try:
            os.fsync(fd)
            os.rename(part, path)
            files.fsync_directory(self._objects)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _checked(
        self, fd: int, path: str, origin: Origin, *, expected: str, digest: bool
    ) -> tuple[int, str, Origin]:
        try:
            wanted = expected if expected.startswith("sha256:") else ""
            if (digest or wanted) and not origin.digest:
                origin = Origin(**{**asdict(origin), "digest": digest_of(fd)})
                self._write_note(path, origin)
            if wanted and origin.digest != wanted:
                raise StaleReferenceError(
                    "its content is not the one that was meant",
                    path=f"{origin.mount}/{origin.path}",
                    mount=origin.mount,
                    node=self.node,
                    hint="It was replaced after the reference was made: send a new reference.",
                )
        except BaseException:
            os.close(fd)
            raise
        self._origins[path] = origin
        return fd, path, origin

    def _read_note(self, path: str) -> Origin | None:
        try:
            with open(path + evict.NOTE_SUFFIX, encoding="utf-8") as file:
                return Origin(**json.load(file))
        except (OSError, ValueError, TypeError):
            return None

    def _write_note(self, path: str, origin: Origin) -> None:
        with files.new_file(path + evict.NOTE_SUFFIX, replace=True) as note:
            os.write(note.fd, json.dumps(asdict(origin)).encode())
            note.publish()

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        from filelock import FileLock

        with FileLock(os.path.join(self._locks, name + ".lock")):
            yield


def cache_directory(chosen: str | None, node: str | None = None) -> str:
    """Gives the directory for copies: the configured one, or the user's cache.

    Raises:
        ConfigError: If it is not on a disk of this machine: locks do not work on some network
            file systems, and a copy there saves nothing.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directory = chosen or os.path.join(home, "mmrpc")
    system = file_system_of(directory)
    if not system.is_local:
        raise ConfigError(
            f"{directory!r} is on {system.kind}, and copies of remote files belong on the node's "
            "own disk",
            node=node,
            key=f"nodes.{node}.cache_dir",
        )
    return directory
