"""Opening files safely, and making new ones that are complete or absent.

A new file has no name until it is whole: it is made with ``O_TMPFILE`` and linked, or, where
the file system cannot do that, under a temporary name that `mmrpc.core.sweep` recognises. A
file that exists is never written in place: replacing it gives its name to another one, and
those who mapped the old one keep its bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from mmrpc.core import sweep
from mmrpc.core.system import libc
from mmrpc.errors import (
    NoSpaceError,
    NotRegularFileError,
    PathError,
    PathExistsError,
    PathNotFoundError,
    PathNotReadableError,
    PathNotWritableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# O_NONBLOCK: opening a FIFO must not wait for its other end.
_OPEN_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_RESERVE_FROM_BYTES: Final = 1 << 20  # below, the write itself is as quick, and reports ENOSPC
_WRITE_BYTES: Final = 1 << 30
_TMPFS_MAGIC: Final = 0x01021994

_MISSING = {errno.ENOENT, errno.ENOTDIR}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS}
_NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def path_error(
    error: OSError, path: str, *, node: str | None = None, writing: bool = False
) -> PathError:
    """Gives the typed error for what the operating system said of a path."""
    number = error.errno
    if number in _MISSING:
        if writing:
            return PathNotFoundError(
                "its directory does not exist", path=path, node=node, hint="Create it first."
            )
        return PathNotFoundError("no such file", path=path, node=node, hint=nearest_existing(path))
    if number == errno.EEXIST:
        return PathExistsError(
            "a file with that name exists",
            path=path,
            node=node,
            hint="Pass existsok=True to replace it.",
        )
    if number == errno.ELOOP:
        return NotRegularFileError("it is a symbolic link", path=path, node=node, hint=_LINK_HINT)
    if number in (errno.EISDIR, errno.ENXIO, errno.ENODEV):
        return NotRegularFileError("it is not a regular file", path=path, node=node)
    if number in _NO_SPACE:
        return NoSpaceError(
            os.strerror(number).lower(), path=path, node=node, free_bytes=_free_bytes(path)
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY):
        kind = PathNotWritableError if writing else PathNotReadableError
        return kind(
            f"{os.strerror(number).lower()} for uid {os.geteuid()}",
            path=path,
            node=node,
            hint="Change its permissions, or run as a user who has them.",
        )
    hint = None
    if number in (errno.EMFILE, errno.ENFILE):
        hint = "Raise the limit of open files (ulimit -n)."
    return PathError((error.strerror or str(error)).lower(), path=path, node=node, hint=hint)


_LINK_HINT = "Give the path that it points to; a link can be pointed elsewhere at any time."
_OTHER_HINT = "Only the bytes of a regular file can be mapped: was it replaced?"


def nearest_existing(path: str) -> str:
    """A hint for a path that is missing: how much of it is there."""
    parent = os.path.dirname(path)
    if os.path.isdir(parent):
        return "Its directory exists: was it moved, deleted, or not written yet?"
    while parent and parent != "/" and not os.path.exists(parent):
        parent = os.path.dirname(parent)
    return f"Of its path, only {parent!r} exists: is the file system mounted?"


def _free_bytes(path: str) -> int | None:
    try:
        free = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return None
    return free.f_bavail * free.f_frsize


_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a character device"),
)


def check_regular(status: os.stat_result, path: str, *, node: str | None = None) -> None:
    """Refuses all but regular files.

    Raises:
        NotRegularFileError: Saying what it is instead.
    """
    if stat.S_ISREG(status.st_mode):
        return
    kind = next((name for test, name in _KINDS if test(status.st_mode)), "of an unknown kind")
    hint = _LINK_HINT if stat.S_ISLNK(status.st_mode) else _OTHER_HINT
    raise NotRegularFileError(f"it is {kind}", path=path, node=node, hint=hint)


def open_regular(path: str, *, writable: bool = False, node: str | None = None) -> int:
    """Opens an existing regular file; nothing is created, followed, truncated or waited for."""
    fd = open_existing(path, writable=writable, node=node)
    try:
        check_regular(os.fstat(fd), path, node=node)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_existing(path: str, *, writable: bool = False, node: str | None = None) -> int:
    """Like `open_regular`, for those who look at what it is themselves: they have its `fstat`.

    Args:
        path: Absolute path.
        writable: Whether to open it for reading and writing.
        node: Name of this node, for errors.

    Returns:
        A descriptor, the caller's to close.

    Raises:
        PathError: The subclass that fits.
    """
    try:
        return os.open(path, _OPEN_FLAGS | (os.O_RDWR if writable else os.O_RDONLY))
    except OSError as error:
        # Who may not even read is told that first.
        may_read = writable and os.access(path, os.R_OK, effective_ids=True)
        raise path_error(error, path, node=node, writing=may_read) from None
    except ValueError as error:  # a NUL in the path
        raise PathNotFoundError(str(error), path=path, node=node) from None


class NewFile:
    """A file in the making; see `new_file`.

    Attributes:
        path: The name that it will get.
        fd: Its descriptor, open for reading and writing.
    """

    def __init__(self, path: str, fd: int, *, part: str | None, replace: bool) -> None:
        self.path = path
        self.fd = fd
        self._part = part  # the temporary name, if it has one
        self._replace = replace

    def publish(self, *, durable: bool = False) -> None:
        """Gives the file its name, at once and whole.

        Args:
            durable: Whether file and name are on the device when this returns.

        Raises:
            PathExistsError: If the name was taken meanwhile, and is not to be replaced.
        """
        try:
            if durable:
                os.fsync(self.fd)
            if self._replace:
                self._rename_over()
            else:
                self._link()
            if durable:
                fsync_directory(os.path.dirname(self.path))
        except OSError as error:
            raise path_error(error, self.path, writing=True) from None

    def _link(self) -> None:
        try:
            if self._part is None:
                self._link_unnamed(self.path)
            else:
                os.link(self._part, self.path)
        except OSError as error:
            if self._part is None or error.errno not in _NO_LINK:
                raise
            libc.rename_noreplace(self._part, self.path)
            self._part = None
        self.discard()

    def _link_unnamed(self, path: str) -> None:
        # The way of linkat(2) to name what O_TMPFILE made. Python calls linkat, which can follow
        # the link in /proc, only if a descriptor of a directory is given; it is not used.
        os.link(f"/proc/self/fd/{self.fd}", path, src_dir_fd=self.fd, follow_symlinks=True)

    def _rename_over(self) -> None:
        if self._part is None:
            part = sweep.part_name(self.path)
            self._link_unnamed(part)
            self._part = part
        os.rename(self._part, self.path)
        self._part = None

    def discard(self) -> None:
        """Removes the temporary name, if there is one."""
        if self._part is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._part)
            self._part = None


@contextlib.contextmanager
def new_file(path: str, *, replace: bool = False) -> Iterator[NewFile]:
    """Makes a file that has no name until `NewFile.publish`; left unpublished, it is gone.

    Args:
        path: Absolute path that it will have. The caller controls the directory.
        replace: Whether the name may be in use; the new file takes its permission bits.

    Raises:
        PathExistsError: If the name is in use and `replace` is false.
        NotRegularFileError: If the name is a link, a directory, or anything but a file.
        PathError: Otherwise, as it fits.
    """
    mode = _mode_of_replaced(path, replace=replace)
    try:
        fd, part = _open_unnamed(path, replace=replace)
    except OSError as error:
        raise path_error(error, path, writing=True) from None
    except ValueError as error:  # a NUL in the path
        raise PathNotFoundError(str(error), path=path) from None
    new = NewFile(path, fd, part=part, replace=replace)
    try:
        if mode is not None:
            os.fchmod(fd, mode)
        yield new
    finally:
        new.discard()
        os.close(fd)


def _mode_of_replaced(path: str, *, replace: bool) -> int | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise path_error(error, path, writing=True) from None
        raise PathNotFoundError(str(error), path=path) from None
    check_regular(status, path)
    if not replace:
        raise path_error(OSError(errno.EEXIST, ""), path, writing=True)
    return stat.S_IMODE(status.st_mode)


def _open_unnamed(path: str, *, replace: bool) -> tuple[int, str | None]:
    directory = os.path.dirname(path)
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _NO_TMPFILE or not os.path.isdir(directory):
            raise
    else:
        if replace:  # its temporary name is there for a moment only, but a kill can hit it
            sweep.sweep_once(directory)
        return fd, None
    sweep.sweep_once(directory)
    part = sweep.part_name(path)
    return os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), part


def fsync_directory(directory: str) -> None:
    """Puts the names in a directory on the device."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reserve(fd: int, nbytes: int, path: str) -> None:
    """Sets the size of a new file and reserves its space, so that no later write can lack it.

    Raises:
        NoSpaceError: If there is less; the file is still nameless then.
    """
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise _no_space(error, nbytes, path, fd) from None


def write(fd: int, pieces: Iterable[memoryview], nbytes: int, path: str) -> None:
    """Writes the whole content of a new file.

    `write(2)` from the tensor's memory, and mapping afterwards, is 2 to 2.5 times faster than
    to map first and copy, which faults every page.

    Args:
        fd: Descriptor of the file.
        pieces: The content, in order.
        nbytes: Its length in bytes.
        path: The name that it will have, for errors.

    Raises:
        NoSpaceError: If there is too little space; the file is still nameless then.
    """
    # On tmpfs a reservation would zero every page first; the write reports ENOSPC as well.
    if nbytes >= _RESERVE_FROM_BYTES and not _is_tmpfs(fd):
        reserve(fd, nbytes, path)
    offset = 0
    try:
        for piece in pieces:
            for start in range(0, len(piece), _WRITE_BYTES):
                part = piece[start : start + _WRITE_BYTES]
                while part:
                    written = os.pwrite(fd, part, offset)
                    offset += written
                    part = part[written:]
    except OSError as error:
        raise _no_space(error, nbytes, path, fd) from None


def _is_tmpfs(fd: int) -> bool:
    return libc.filesystem_type(fd) == _TMPFS_MAGIC


def _no_space(error: OSError, nbytes: int, path: str, fd: int) -> PathError:
    if error.errno not in _NO_SPACE:
        return path_error(error, path, writing=True)
    free = _free_bytes(path)
    if free is not None:
        free += os.fstat(fd).st_blocks * 512  # what the unfinished file takes is free in a moment
    have = "" if free is None else f" and {free:,} are free"
    return NoSpaceError(
        f"{nbytes:,} bytes are needed{have}",
        path=path,
        hint="Free some, or choose another file system.",
        needed_bytes=nbytes,
        free_bytes=free,
    )
