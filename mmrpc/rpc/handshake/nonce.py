"""Files by which nodes prove that they mean the same directory: nonces and id files.

A nonce is a small file with a random text, made for one handshake, flushed, read by the others
and removed. Its name says which process made it, so that the next handshake recognises what a
killed one left: at once on the same host, and on another when it is too old to be in use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from typing import TYPE_CHECKING

from mmrpc.core import files
from mmrpc.core.identity import identify
from mmrpc.core.system import host
from mmrpc.errors import NotSharedError, PathError, PathNotFoundError
from mmrpc.rpc.handshake.messages import Nonce
from mmrpc.rpc.handshake.report import FileMark

if TYPE_CHECKING:
    from mmrpc.paths.mounts import Mount
    from mmrpc.paths.remote import Remote

ID_FILE = ".mmrpc-mount"
"""Name of the file by which a mount that nobody may write is known."""

_NONCE = re.compile(
    r"\.mmrpc-nonce-(?P<host>[0-9a-f]{16})-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{8}"
)
_OTHER_HOST_S = 600.0  # of another host's maker we know only the age
_MAX_BYTES = 256
_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 1.0


def can_write(mount: Mount) -> bool:
    """Whether this process can make files in the root of a local mount; leaves none."""
    try:
        # A file without a name leaves nothing behind, whatever happens.
        os.close(os.open(mount.root, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS, errno.EINVAL):
            return False
        return os.access(mount.root, os.W_OK | os.X_OK, effective_ids=True)
    return True


def write(mount: Mount, node: str) -> Nonce:
    """Makes a nonce in a mount's root, on the device when it returns.

    The caller owns it, and removes it with `remove`.

    Raises:
        PathError: If it cannot be made; then nothing is left.
    """
    text = secrets.token_hex(16)
    maker = f"{host.memory_host_id()}-{os.getpid()}-{host.own_start_time()}"
    name = f".mmrpc-nonce-{maker}-{secrets.token_hex(4)}"
    mark = FileMark()
    if mount.is_local:
        mark = _create(mount.local_path(name), text, node, mount.name)
    else:
        _remote(mount, node).create(name, text.encode())
    return Nonce(mount=mount.name, name=name, text=text, writer=node, path=mount.root, mark=mark)


def _create(path: str, text: str, node: str, mount: str) -> FileMark:
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o644)
        try:
            # Others may run as another user, whatever this one's umask.
            with contextlib.suppress(PermissionError):
                os.fchmod(fd, 0o644)
            os.write(fd, text.encode())
            os.fsync(fd)
            return _mark(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        typed = files.path_error(error, path, node=node, writing=True)
        typed.mount = mount
        raise typed from error


def read(mount: Mount, nonce: Nonce, node: str, *, visible_s: float) -> FileMark:
    """Reads a nonce that another node has written.

    Args:
        mount: The mount, as it is here.
        nonce: What to expect.
        node: This node, for errors.
        visible_s: Seconds that it may take to be seen; 0 where it is seen at once.

    Raises:
        NotSharedError: If it is not there, or holds something else.
        PathError: If it cannot be read.
    """
    deadline = time.monotonic() + visible_s
    wait_s = _FIRST_WAIT_S
    while True:
        reason = f"the file that {nonce.writer} wrote to {nonce.path!r} is not in it"
        try:
            text, mark = _read_small(mount, nonce.name, node)
            if text == nonce.text:
                return mark
            reason = f"a file there is not the one that {nonce.writer} wrote to {nonce.path!r}"
        except PathNotFoundError:
            pass
        if time.monotonic() >= deadline:
            break
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        if mount.is_local:
            # NFS remembers that a name was missing until its directory is read.
            with contextlib.suppress(OSError):
                os.listdir(mount.root)
    after = f", {visible_s:g} s later" if visible_s else ""
    raise NotSharedError(
        f"this is not the directory that {nonce.writer} has: {reason}{after}",
        path=mount.root,
        mount=mount.name,
        node=node,
        hint=f"Mount the same file system on both, or fix nodes.{node}.mounts.{mount.name}.",
    )


def remove(mount: Mount, nonce: Nonce, node: str) -> None:
    """Removes a nonce; it need not be there any more."""
    if mount.is_local:
        with contextlib.suppress(OSError):
            os.unlink(mount.local_path(nonce.name))
    else:
        with contextlib.suppress(PathError):
            _remote(mount, node).remove(nonce.name)


def sweep(mount: Mount, nonce: Nonce, *, in_use_s: float) -> list[str]:
    """Removes nonces that killed handshakes left in a local mount; gives their names.

    Args:
        mount: The mount.
        nonce: One that was just written there: its time is that of the file system's clock.
        in_use_s: Seconds for which another host's nonce may be in use.
    """
    removed: list[str] = []
    if not mount.is_local:
        return removed
    with contextlib.suppress(OSError):
        now = os.lstat(mount.local_path(nonce.name)).st_mtime
        with os.scandir(mount.root) as entries:
            for entry in entries:
                if _is_stale(entry, now - max(in_use_s, _OTHER_HOST_S)):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                        removed.append(entry.name)
    return removed


def _is_stale(entry: os.DirEntry[str], before: float) -> bool:
    match = _NONCE.fullmatch(entry.name)
    if match is None:
        return False
    if match["host"] == host.memory_host_id():
        return not host.is_alive(int(match["pid"]), int(match["started"]))
    return entry.stat(follow_symlinks=False).st_mtime < before


def read_id(mount: Mount, node: str) -> tuple[str, FileMark] | None:
    """Reads the id file of a mount, or gives None if there is none.

    Raises:
        PathError: If it is there and cannot be read.
    """
    try:
        text, mark = _read_small(mount, ID_FILE, node)
    except PathNotFoundError:
        return None
    return text.strip(), mark


def write_id(mount: Mount, node: str) -> str:
    """Makes the id file of a mount, once; gives its text, also if it was there before.

    Raises:
        PathError: If it cannot be made.
    """
    found = read_id(mount, node)
    if found is not None:
        return found[0]
    text = secrets.token_hex(16)
    if not mount.is_local:
        _remote(mount, node).create(ID_FILE, text.encode())
        return text
    path = mount.local_path(ID_FILE)
    try:
        with files.new_file(path) as new:
            os.fchmod(new.fd, 0o444)
            os.write(new.fd, text.encode())
            new.publish(durable=True)
    except PathError as error:
        error.node, error.mount = node, mount.name
        raise
    return text


def _read_small(mount: Mount, name: str, node: str) -> tuple[str, FileMark]:
    if not mount.is_local:
        return _remote(mount, node).read(name, _MAX_BYTES).decode("ascii", "replace"), FileMark()
    path = mount.local_path(name)
    try:
        fd = files.open_regular(path, node=node)
    except PathError as error:
        error.mount = mount.name
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.ESTALE:
            raise PathNotFoundError("no such file", path=path, node=node) from error
        raise
    try:
        return os.read(fd, _MAX_BYTES).decode("ascii", "replace"), _mark(fd)
    finally:
        os.close(fd)


def _mark(fd: int) -> FileMark:
    identity = identify(fd)
    generation = identity.generation.hex() if identity.is_strong else ""
    return FileMark(inode=identity.inode, generation=generation)


def _remote(mount: Mount, node: str) -> Remote:
    from mmrpc.paths.remote import Remote

    return Remote(mount, node=node)
