"""What the numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile

from benchmarks.lines.peers import PEERS


def describe() -> dict[str, str]:
    """The machine and the versions, for people and for the JSON file."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "disk": _filesystem(tempfile.gettempdir()),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        **{name: version(name) or "not installed" for name in PEERS},
    }


def version(distribution: str) -> str | None:
    """The installed version of a distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("model name", "CPU part")):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def _filesystem(path: str) -> str:
    """Type of the file system that holds a path: that of the longest mount point above it."""
    best, kind = "", "unknown"
    with open("/proc/self/mounts") as file:
        for line in file:
            _, point, fstype, *_ = line.split()
            inside = os.path.realpath(path).startswith(point.rstrip("/") + "/") or point == "/"
            if inside and len(point) > len(best):
                best, kind = point, fstype
    return kind
