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
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mmrpc.core.system import host
from mmrpc.core.trees import directory as treedir
from mmrpc.errors import MmrpcError

if TYPE_CHECKING:
    from collections.abc import Iterator

DIRECTORY: Final = "leases"
"""The directory of the leases, in that of the versions."""
_SUFFIX: Final = ".json"
_MAX_BYTES: Final = 4096


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

    @classmethod
    def parse(cls, data: bytes) -> Lease:
        """Reads one.

        Raises:
            ValueError: If it is none.
        """
        fields: Any = json.loads(data)
        kinds = {"version": int, "host": str, "pid": int, "started": int}
        if not isinstance(fields, dict) or {k: type(v) for k, v in fields.items()} != kinds:
            raise ValueError("it is no lease")
        return cls(**fields)


class Reader:
    """The lease of one reader; it is a file, replaced at each version.

    A process that was forked has a lease of its own, and leaves its parent's alone.

    Args:
        directory: Where the leases are; made if missing.

    Raises:
        PathError: If it cannot be made.
    """

    def __init__(self, directory: str) -> None:
        treedir.make_directory(directory)
        self._directory = directory
        self._pid = 0
        self._path = ""

    def hold(self, version: int) -> None:
        """Claims a version in place of the one before.

        Raises:
            PathError: If that cannot be written.
        """
        if self._pid != os.getpid():
            self._pid = os.getpid()
            name = f"{socket.gethostname()}-{self._pid}-{secrets.token_hex(4)}{_SUFFIX}"
            self._path = os.path.join(self._directory, name)
        lease = Lease(version, host.memory_host_id(), self._pid, host.own_start_time())
        treedir.write_small(self._path, json.dumps(asdict(lease)).encode())

    def release(self) -> None:
        """Gives up the claim."""
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):  # then it ends with this process
                os.unlink(self._path)


@dataclass
class Leases:
    """The leases in a directory, as the writer of the versions sees them.

    Attributes:
        directory: Where they are.
        ttl_s: Seconds after which the lease of a reader on another host counts no more, unless
            the reader has renewed it; counted here, since clocks differ and jump.
    """

    directory: str
    ttl_s: float
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def held(self) -> dict[str, int]:
        """Which version each reader holds; leases of those that are gone are removed."""
        return {name: lease.version for name, lease in self._living()}

    def _living(self) -> Iterator[tuple[str, Lease]]:
        try:
            names = sorted(os.listdir(self.directory))
        except OSError:
            names = []
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        for name in names:
            if not name.endswith(_SUFFIX):
                continue
            path = os.path.join(self.directory, name)
            try:
                lease = Lease.parse(treedir.read_small(path, _MAX_BYTES))
                written_ns = os.stat(path).st_mtime_ns
            except (OSError, MmrpcError, ValueError, RecursionError):
                continue  # released just now, or no lease
            if self._is_over(name, lease, written_ns):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            else:
                yield name.removesuffix(_SUFFIX), lease

    def _is_over(self, name: str, lease: Lease, written_ns: int) -> bool:
        if lease.host == host.memory_host_id():
            return not host.is_alive(lease.pid, lease.started)
        now_s = time.monotonic()
        seen = self._seen.get(name)
        if seen is None or seen[0] != written_ns:
            seen = self._seen[name] = written_ns, now_s
        return now_s - seen[1] > self.ttl_s
