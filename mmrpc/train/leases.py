"""Leases: which version each reader maps, so that it is not deleted under it.

On one host a deleted file stays for those who map it, but not on NFS. A reader writes its lease
before it opens a version; the writer sets a version aside before it looks for leases. So either
the reader finds the name gone and takes a newer version, or the writer finds the lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mmrpc.core import files
from mmrpc.core.system import host

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Lease:
    """A reader's claim on a version.

    Attributes:
        version: Number of the version.
        host: `mmrpc.core.system.host.memory_host_id()` of the reader.
        pid: Its process there.
        started: Start time of that process.
    """

    version: int
    host: str
    pid: int
    started: int


class Reader:
    """The lease of one reader; it is a file, replaced at each version.

    Args:
        directory: Where the leases are; made if missing.

    Raises:
        PathNotWritableError: If it cannot be made.
    """

    def __init__(self, directory: str) -> None:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
        except OSError as error:
            raise files.path_error(error, directory, writing=True) from None
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.json"
        self._path = os.path.join(directory, name)

    def hold(self, version: int) -> None:
        """Claims a version in place of the one before."""
        lease = Lease(version, host.memory_host_id(), os.getpid(), host.own_start_time())
        write_text(self._path, json.dumps(asdict(lease)), durable=False)

    def release(self) -> None:
        """Gives up the claim."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


def held(directory: str, ttl_s: float) -> dict[str, int]:
    """Which version each reader holds; leases of those that are gone are removed.

    Args:
        directory: Where the leases are.
        ttl_s: Seconds after which the lease of a reader on another host counts no more, unless
            the reader has renewed it.
    """
    return {name: lease.version for name, lease in _living(directory, ttl_s)}


def _living(directory: str, ttl_s: float) -> Iterator[tuple[str, Lease]]:
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    for name in names:
        path = os.path.join(directory, name)
        if not name.endswith(".json"):
            continue
        try:
            with open(path, encoding="utf-8") as file:
                lease = Lease(**json.load(file))
                age_s = time.time() - os.fstat(file.fileno()).st_mtime
        except (OSError, ValueError, TypeError):  # released just now, or no lease
            continue
        if _is_over(lease, age_s, ttl_s):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        else:
            yield name.removesuffix(".json"), lease


def _is_over(lease: Lease, age_s: float, ttl_s: float) -> bool:
    if lease.host == host.memory_host_id():
        return not host.is_alive(lease.pid, lease.started)
    return age_s > ttl_s


def write_text(path: str, text: str, *, durable: bool) -> None:
    """Gives a file a new text at once: readers see the old one or the new one.

    Raises:
        NoSpaceError: If there is too little space; the old text stays.
        PathError: If it cannot be written.
    """
    data = text.encode()
    with files.new_file(path, replace=True) as file:
        files.write(file.fd, [memoryview(data)], len(data), path)
        file.publish(durable=durable)
