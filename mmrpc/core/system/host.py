"""Which host this process is on, and which process it is, in terms others can compare.

Two processes are on one host for files if they share the kernel's boot and the mount
namespace: then a path and an inode mean the same to both. For anonymous memory it is the boot
and the PID namespace, since it is reached through ``/proc/<pid>``.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:  # no /proc: nobody else can be shown to share it
        return f"{kind}:pid-{os.getpid()}"


@functools.cache
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"pid-{os.getpid()}"


@functools.cache
def host_id() -> str:
    """16 hex digits that are equal for two processes if paths mean the same to both."""
    return _digest(_boot_id(), _namespace("mnt"))


@functools.cache
def memory_host_id() -> str:
    """16 hex digits that are equal for two processes if PIDs mean the same to both."""
    return _digest(_boot_id(), _namespace("pid"))


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if it has ended.

    Raises:
        OSError: If this process has no descriptor left to look with.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    # The command, in parentheses, may hold spaces and parentheses itself; see proc(5).
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    # A zombie waits for its parent only; its memory and descriptors are gone.
    return None if state in (b"Z", b"X") else int(fields[18])


@functools.cache
def own_start_time() -> int:
    """Start time of this process in clock ticks since boot; 0 if unknown."""
    return start_time(os.getpid()) or 0


def is_alive(pid: int, started: int) -> bool:
    """Whether the process that had this PID and start time still runs on this host.

    Without a descriptor to look with it counts as alive: what is its own stays its own.
    """
    try:
        return start_time(pid) == started
    except OSError:
        return True


def _forget() -> None:
    for cached in (host_id, memory_host_id, own_start_time):
        cached.cache_clear()


# A child may move to other namespaces, and is another process.
os.register_at_fork(after_in_child=_forget)
