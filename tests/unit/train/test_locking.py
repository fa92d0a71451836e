"""One writer in a directory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mmrpc.errors import PathError, PathExistsError
from mmrpc.train.locking import lock

CHILD = """
import sys
from mmrpc.train.locking import lock
held = lock(sys.argv[1])
print("has it", flush=True)
sys.stdin.read()
"""


def test_a_directory_has_one_writer(tmp_path) -> None:
    """A second one would change what the first one holds."""
    held = lock(str(tmp_path))
    with pytest.raises(PathExistsError, match="another parameter server or publisher writes"):
        lock(str(tmp_path))
    held.release()
    lock(str(tmp_path)).release()


def test_a_killed_writer_has_it_no_more(tmp_path) -> None:
    """The lock ends with its process, however that ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout.readline() == b"has it\n"
        with pytest.raises(PathExistsError):
            lock(str(tmp_path))
    finally:
        child.kill()
        child.communicate(timeout=30)
    lock(str(tmp_path)).release()


def test_a_forked_child_does_not_keep_it(tmp_path) -> None:
    """A child that lives longer than its parent's lock does not hold the directory."""
    held = lock(str(tmp_path))
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(there)
        os.read(here, 1)
        os._exit(0)
    os.close(here)
    try:
        held.release()
        lock(str(tmp_path)).release()
    finally:
        os.close(there)
        os.waitpid(pid, 0)


def test_where_no_lock_can_be(tmp_path) -> None:
    """Something else under its name is a typed error."""
    (tmp_path / "writer.lock").mkdir()
    with pytest.raises(PathError):
        lock(str(tmp_path))
