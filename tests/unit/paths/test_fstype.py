"""File system types from mountinfo(5), and what follows from them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mmrpc.paths.fstype import UNKNOWN, FileSystem, file_system_of, find_in

MOUNTINFO = r"""
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
22 21 0:20 / /mnt/nfs rw,relatime shared:2 - nfs4 server:/export rw,vers=4.2
23 22 0:21 / /mnt/nfs/fast ro - lustre mds@tcp:/fs rw
24 21 0:22 / /mnt/with\040space rw - fuse.sshfs host:/ rw
25 21 0:23 / /mnt/twice rw - tmpfs first rw
26 21 0:24 / /mnt/twice rw - xfs second ro
malformed
"""


@pytest.mark.parametrize(
    ("path", "kind", "source", "read_only"),
    [
        ("/srv/x", "ext4", "/dev/vda", False),
        ("/mnt/nfs", "nfs4", "server:/export", False),
        ("/mnt/nfs/x", "nfs4", "server:/export", False),
        ("/mnt/nfsx", "ext4", "/dev/vda", False),
        ("/mnt/nfs/fast/x", "lustre", "mds@tcp:/fs", True),
        ("/mnt/with space/x", "fuse.sshfs", "host:/", False),
        ("/mnt/twice/x", "xfs", "second", True),
    ],
)
def test_the_innermost_and_last_mount_counts(
    path: str, kind: str, source: str, read_only: bool
) -> None:
    """A path belongs to the deepest mount above it, and of two on one directory to the later."""
    found = find_in(MOUNTINFO, path)
    assert (found.kind, found.source, found.read_only) == (kind, source, read_only)


def test_without_a_table_it_is_unknown_and_read_by_copy() -> None:
    """What is not known is treated as what could change under a mapping."""
    assert find_in("", "/x") == UNKNOWN
    assert UNKNOWN.default_reader == "copy"
    assert not UNKNOWN.is_local


@pytest.mark.parametrize(
    ("kind", "reader", "is_local"),
    [
        ("ext4", "mmap", True),
        ("tmpfs", "mmap", True),
        ("nfs4", "prefetch", False),
        ("lustre", "prefetch", False),
        ("fuse.sshfs", "copy", False),
        ("fuse.glusterfs", "prefetch", False),
    ],
)
def test_readers_follow_from_the_type(kind: str, reader: str, is_local: bool) -> None:
    """Mapping for what this kernel serves, reading ahead on networks, copies for FUSE."""
    system = FileSystem(kind, "x", "/", False)
    assert (system.default_reader, system.is_local) == (reader, is_local)


def test_it_agrees_with_findmnt(tmp_path: Path) -> None:
    """On this machine, the type is the one that another program sees."""
    done = subprocess.run(
        ["findmnt", "-n", "-o", "FSTYPE", "--target", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert file_system_of(str(tmp_path)).kind == done.stdout.strip()
