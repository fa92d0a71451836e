"""Open a file below a directory so that nothing gets out of it, whatever changes meanwhile.

The kernel does it in one step, `openat2(2)`; where that call is missing or forbidden, the path
is walked part by part from one descriptor to the next, and no part may be a symbolic link.
Symbolic links are refused in both: where they lead is for the sender to say (it sends the path
that is behind them), not for the file system of whoever receives.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import stat as stat_module
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmrpc.core import files
from mmrpc.errors import (
    OutsideMountsError,
    PathError,
    PathNotFoundError,
    StaleReferenceError,
)
from mmrpc.paths.relative import split_relative

if TYPE_CHECKING:
    from collections.abc import Sequence

# The number is the same on all architectures but Alpha, which adds 110 to it.
_SYS_OPENAT2 = 437 if platform.machine() != "alpha" else 547
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RETRIES = 16

_DIRECTORY_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LOOK_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO waits for a writer.
_FILE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def open_beneath(
    root: str,
    relative: str,
    *,
    writable: bool = False,
    same_file_system: bool = False,
    mount: str | None = None,
    node: str | None = None,
) -> int:
    """Opens the regular file ``relative`` below the directory ``root``.

    Args:
        root: Absolute path of the directory; its own path may hold symbolic links.
        relative: Path of the file in it, from an untrusted source.
        writable: Open for reading and writing, else for reading.
        same_file_system: Refuse what is on a file system mounted below ``root``.
        mount: Name of the mount, for errors.
        node: Name of this node, for errors.

    Returns:
        A descriptor that the caller owns. Nothing was created or changed.

    Raises:
        OutsideMountsError: If the path is not one inside a mount, or a symbolic link or (with
            ``same_file_system``) another file system is in it.
        PathNotFoundError: If the root or the file is missing.
        PathNotReadableError: If it may not be read.
        PathNotWritableError: If it may not be written.
        NotRegularFileError: If it is a directory, FIFO, socket or device.
    """
    flags = _FILE_FLAGS | (os.O_RDWR if writable else os.O_RDONLY)
    about = _Where(f"{root.rstrip('/')}/{relative}", mount, node, writable)
    return _open(root, relative, flags, same_file_system, about)


def look_beneath(
    root: str, relative: str, *, mount: str | None = None, node: str | None = None
) -> int:
    """Finds the regular file ``relative`` below ``root`` without opening it for reading.

    Returns:
        A descriptor with ``O_PATH``, which the caller owns; it serves `os.fstat` and
        `mmrpc.core.identity.identify`, and needs no permission on the file.

    Raises:
        PathError: As `open_beneath` does.
    """
    about = _Where(f"{root.rstrip('/')}/{relative}", mount, node, writable=False)
    return _open(root, relative, None, same_file_system=False, where=about)


def _open(
    root: str, relative: str, flags: int | None, same_file_system: bool, where: _Where
) -> int:
    parts = split_relative(relative, mount=where.mount, node=where.node)
    try:
        root_fd = os.open(root, _DIRECTORY_FLAGS)
    except OSError as error:
        raise where.root_error(root, error) from error
    try:
        # Looked at before it is opened: opening alone makes some devices act.
        fd = _regular(_open_parts(root_fd, parts, _LOOK_FLAGS, same_file_system), where)
        if flags is not None:
            os.close(fd)
            fd = _regular(_open_parts(root_fd, parts, flags, same_file_system), where)
    except PathError as error:
        error.mount = where.mount
        raise
    except OSError as error:
        raise where.error(error) from error
    finally:
        os.close(root_fd)
    return fd


def _regular(fd: int, where: _Where) -> int:
    try:
        status = os.fstat(fd)
        if stat_module.S_ISLNK(status.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        files.check_regular(status, where.path, node=where.node)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_parts(root_fd: int, parts: Sequence[str], flags: int, same_file_system: bool) -> int:
    if has_openat2():
        return _openat2(root_fd, parts, flags, same_file_system)
    return _walk(root_fd, parts, flags, same_file_system)


@functools.cache
def has_openat2() -> bool:
    """Whether this kernel has the call, and whoever confines this process lets it through."""
    root_fd = os.open("/", _DIRECTORY_FLAGS)
    try:
        os.close(_call_openat2(root_fd, b".", _LOOK_FLAGS, _RESOLVE_BENEATH))
    except OSError:
        return False
    finally:
        os.close(root_fd)
    return True


def _openat2(root_fd: int, parts: Sequence[str], flags: int, same_file_system: bool) -> int:
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS
    if same_file_system:
        resolve |= _RESOLVE_NO_XDEV
    path = os.fsencode("/".join(parts))
    for _ in range(_RETRIES):
        try:
            return _call_openat2(root_fd, path, flags, resolve)
        except (BlockingIOError, InterruptedError):
            # The kernel asks for another try when a directory is renamed during the walk.
            continue
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _call_openat2(root_fd: int, path: bytes, flags: int, resolve: int) -> int:
    how = _OpenHow(flags, 0, resolve)
    fd: int = _libc.syscall(
        ctypes.c_long(_SYS_OPENAT2),
        ctypes.c_int(root_fd),
        ctypes.c_char_p(path),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd


def _walk(root_fd: int, parts: Sequence[str], flags: int, same_file_system: bool) -> int:
    device = os.fstat(root_fd).st_dev
    directory = os.dup(root_fd)
    try:
        for part in parts[:-1]:
            # The link itself is opened, so that it can be told from a file on the way.
            below = os.open(part, _LOOK_FLAGS, dir_fd=directory)
            os.close(directory)
            directory = below
            if stat_module.S_ISLNK(os.fstat(directory).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if same_file_system:
            found = os.stat(parts[-1], dir_fd=directory, follow_symlinks=False)
            if found.st_dev != device:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return os.open(parts[-1], flags, dir_fd=directory)
    finally:
        os.close(directory)


@dataclass(frozen=True, slots=True)
class _Where:
    """What a failure was about, to say it in the terms of `mmrpc.errors`."""

    path: str
    mount: str | None
    node: str | None
    writable: bool

    def error(self, error: OSError) -> PathError:
        """Translates the failure of opening a file in the mount."""
        number = error.errno
        about = {"path": self.path, "mount": self.mount, "node": self.node}
        if number == errno.ELOOP:
            return OutsideMountsError(
                "a symbolic link is in the path, and links can lead out of the mount",
                hint="Refer to the file that is behind the link.",
                **about,
            )
        if number == errno.EXDEV:
            return OutsideMountsError(
                "another file system is mounted there, and only the mount's own was proven",
                hint="Make it a mount of its own in the config.",
                **about,
            )
        if number == errno.ESTALE:
            return StaleReferenceError("the server no longer has that file", **about)
        return self._general(error, self.path)

    def root_error(self, root: str, error: OSError) -> PathError:
        """Translates the failure of opening the mount's own directory."""
        missing = {errno.ENOENT: "no such directory", errno.ENOTDIR: "it is not a directory"}
        if error.errno not in missing:
            return self._general(error, root)
        return PathNotFoundError(
            missing[error.errno],
            path=root,
            mount=self.mount,
            node=self.node,
            hint=f"Mount it, or fix nodes.{self.node or '…'}.mounts.{self.mount or '…'}.",
        )

    def _general(self, error: OSError, path: str) -> PathError:
        typed = files.path_error(error, path, node=self.node, writing=self._is_write_refused(error))
        typed.mount = self.mount
        return typed

    def _is_write_refused(self, error: OSError) -> bool:
        return self.writable and error.errno not in (errno.ENOENT, errno.ENOTDIR)
