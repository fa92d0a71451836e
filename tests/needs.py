"""Parts of a machine that some tests need: one list, one marker, one way to skip.

    @needs("sshd", "namespaces")
    def test_...

skips the test where a part is missing. With ``MMRPC_REQUIRE_ALL=1``, as in CI, every skip is a
failure: what CI does not run, nobody runs.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable

import pytest

REQUIRE_ALL = os.environ.get("MMRPC_REQUIRE_ALL") == "1"

# Daemons live in sbin, which is not on the PATH of everyone who may run them.
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


def program(name: str) -> str | None:
    """Path of a program, also if it is one of the system's."""
    return shutil.which(name, path=_PATH)


def _programs(*names: str) -> str | None:
    missing = [name for name in names if program(name) is None]
    return f"no {', '.join(missing)} on this machine" if missing else None


def _root() -> str | None:
    return None if os.geteuid() == 0 else "not root"


def _compiler() -> str | None:
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    return _programs("g++") or (None if os.path.exists(header) else f"no {header}")


def _namespaces() -> str | None:
    if problem := _root() or _programs("unshare", "ip", "mount"):
        return problem
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--net", "--uts", "true"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.stderr.strip() or "unshare failed" if done.returncode else None


def _sshfs() -> str | None:
    if problem := _programs("sshfs", "fusermount3", "sshd"):
        return problem
    return None if os.access("/dev/fuse", os.R_OK | os.W_OK) else "no /dev/fuse"


PARTS: dict[str, Callable[[], str | None]] = {
    "compiler": _compiler,
    "root": _root,
    "namespaces": _namespaces,
    "sshd": lambda: _programs("sshd", "ssh", "ssh-keygen"),
    "sshfs": _sshfs,
    "slurm": lambda: _root() or _programs("slurmctld", "slurmd", "srun", "sbatch", "munged"),
}
"""Name of each part, and the probe that says what is missing of it, or None."""


@functools.cache
def missing(part: str) -> str | None:
    """What is missing of a part on this machine, or None."""
    return PARTS[part]()


def needs(*parts: str) -> pytest.MarkDecorator:
    """Marks a test, class or module (``pytestmark = needs(...)``) that needs these parts."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ValueError(f"unknown part {unknown[0]!r}: tests/needs.py lists {', '.join(PARTS)}")
    return pytest.mark.needs(*parts)
