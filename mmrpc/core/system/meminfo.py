"""How much memory can still be had, before the kernel starts to kill for it."""

from __future__ import annotations

from typing import Final

_CGROUP: Final = "/sys/fs/cgroup"


def available_bytes() -> int | None:
    """Bytes of memory that are available to this process, or None if nobody tells.

    A memory file has no size limit of its own: without this check, too much of it ends in the
    out-of-memory killer, not in an error.
    """
    known = [n for n in (_system(), _cgroup()) if n is not None]
    return min(known, default=None)


def _system() -> int | None:
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup() -> int | None:
    """What the cgroup (version 2) that a container gives us as its root leaves."""
    try:
        with open(f"{_CGROUP}/memory.max") as file:
            limit = file.read().strip()
        with open(f"{_CGROUP}/memory.current") as file:
            current = int(file.read())
        return None if limit == "max" else max(int(limit) - current, 0)
    except (OSError, ValueError):
        return None
