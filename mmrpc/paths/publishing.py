"""Write files into a mount so that other nodes see all of them, complete, or none.

They are made in a scratch directory. A local mount gets it by one rename; a remote one file by
file, and the manifest last. What is published is never changed: new content gets a new name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from typing import TYPE_CHECKING

from mmrpc.core import files, sweep
from mmrpc.core.system import libc
from mmrpc.errors import LayoutError, PathError, PathExistsError, PathNotFoundError
from mmrpc.paths import manifest as manifests
from mmrpc.paths.beneath import open_beneath
from mmrpc.paths.content import digest_of
from mmrpc.paths.manifest import Entry, Manifest
from mmrpc.paths.relative import split_relative

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mmrpc.paths.mounts import Mount
    from mmrpc.paths.remote import Remote

_NO_RENAMEAT2 = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


@contextlib.contextmanager
def publishing(
    mount: Mount, relative: str, *, remote: Remote | None = None, node: str | None = None
) -> Iterator[str]:
    """Gives an empty directory, and publishes what is in it when the block ends well.

    The files become read-only and durable, and a manifest with their sizes and digests is added.
    If the block raises, nothing is published and the directory is removed.

    Args:
        mount: Where to publish.
        relative: Path of the new directory in the mount; no such directory may exist.
        remote: Client of the mount, if it is remote.
        node: Name of this node, for errors.

    Raises:
        PathExistsError: If something was published under that path, before or meanwhile.
        PathError: If it cannot be written.
    """
    split_relative(relative, mount=mount.name, node=node)
    if remote is not None:
        with tempfile.TemporaryDirectory(prefix="mmrpc-publish-") as scratch:
            _refuse_published(remote, relative)
            yield scratch
            _upload(scratch, _seal(scratch), remote, relative)
        return
    target = mount.local_path(relative)
    with _errors(target, mount, node):
        parent = os.path.dirname(target)
        os.makedirs(parent, exist_ok=True)
        _sweep_directories(parent)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        scratch = sweep.part_name(target)
        os.mkdir(scratch)
    try:
        yield scratch
        with _errors(target, mount, node):
            _seal(scratch)
            _rename(scratch, target)
            files.fsync_directory(parent)
    finally:
        if os.path.lexists(scratch):
            shutil.rmtree(scratch, ignore_errors=True)


def read_manifest(
    mount: Mount, relative: str, *, remote: Remote | None = None, node: str | None = None
) -> Manifest:
    """Reads the manifest of something published.

    Raises:
        PathNotFoundError: If nothing complete is there.
        PathError: If the manifest is malformed or cannot be read.
    """
    name = f"{relative}/{manifests.NAME}"
    try:
        if remote is not None:
            return Manifest.from_json(remote.read(name, manifests.MAX_BYTES))
        fd = open_beneath(mount.root, name, mount=mount.name, node=node)
        with open(fd, "rb") as file:
            return Manifest.from_json(file.read(manifests.MAX_BYTES))
    except PathNotFoundError as error:
        raise PathNotFoundError(
            "nothing complete is published there",
            path=f"{mount.root.rstrip('/')}/{relative}",
            mount=mount.name,
            node=node,
            hint="It is still being written, or the writer failed.",
        ) from error
    except LayoutError as error:
        raise PathError(error.reason, path=name, mount=mount.name, node=node) from None


def _seal(scratch: str) -> Manifest:
    """Makes all files in a directory read-only and durable, and lists them in a manifest."""
    entries: dict[str, Entry] = {}
    for directory, _, names in os.walk(scratch, onerror=_raise):
        for name in names:
            path = os.path.join(directory, name)
            fd = files.open_regular(path)
            try:
                status = os.fstat(fd)
                os.fchmod(fd, stat.S_IMODE(status.st_mode) & ~0o222)
                os.fsync(fd)
                entries[os.path.relpath(path, scratch)] = Entry(status.st_size, digest_of(fd))
            finally:
                os.close(fd)
        files.fsync_directory(directory)
    manifest = Manifest(entries)
    with files.new_file(os.path.join(scratch, manifests.NAME)) as new:
        text = memoryview(manifest.to_json().encode())
        files.write(new.fd, [text], len(text), new.path)
        os.fchmod(new.fd, 0o444 & ~_umask())
        new.publish(durable=True)
    return manifest


def _raise(error: OSError) -> None:
    raise error


def _umask() -> int:
    # There is no way to read it but to set it, and another thread could make a file meanwhile.
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def _rename(scratch: str, target: str) -> None:
    try:
        try:
            libc.rename_noreplace(scratch, target)
        except OSError as error:
            if error.errno not in _NO_RENAMEAT2:
                raise
            # Over a directory that is not empty, which what is published never is, it fails.
            os.rename(scratch, target)
    except OSError:
        # NFS may report as failed what its server has done.
        if os.path.lexists(scratch) or not os.path.lexists(target):
            raise


def _sweep_directories(parent: str) -> None:
    """Removes the scratch directories of publishers that have died."""
    with os.scandir(parent) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and sweep.is_stale(entry.path):
                shutil.rmtree(entry.path, ignore_errors=True)


@contextlib.contextmanager
def _errors(target: str, mount: Mount, node: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, PathError):
            raise
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise _exists(target, mount, node) from None
        typed = files.path_error(error, target, node=node, writing=True)
        typed.mount = mount.name
        raise typed from error


def _exists(path: str, mount: Mount, node: str | None) -> PathExistsError:
    return PathExistsError(
        "something is there already, and what is published is never changed",
        path=path,
        mount=mount.name,
        node=node,
        hint="Publish under a new name.",
    )


def _refuse_published(remote: Remote, relative: str) -> None:
    with contextlib.suppress(PathNotFoundError):
        remote.info(f"{relative}/{manifests.NAME}")
        raise _exists(remote.url(relative), remote.mount, remote.node)


def _upload(scratch: str, manifest: Manifest, remote: Remote, relative: str) -> None:
    done: list[str] = []
    try:
        for name, entry in manifest.files.items():
            done.append(f"{relative}/{name}")
            remote.put(os.path.join(scratch, name), done[-1])
            size_bytes = remote.info(done[-1]).size_bytes
            if size_bytes != entry.size_bytes:
                raise PathError(
                    f"{size_bytes:,} bytes arrived of {entry.size_bytes:,}",
                    path=remote.url(done[-1]),
                    mount=remote.mount.name,
                    node=remote.node,
                )
        try:
            remote.create(f"{relative}/{manifests.NAME}", manifest.to_json().encode())
        except PathExistsError:
            done.clear()  # another publisher was faster, and these names may be its files
            raise _exists(remote.url(relative), remote.mount, remote.node) from None
    except BaseException:
        for name in done:
            with contextlib.suppress(PathError):
                remote.remove(name)
        raise
