"""The example of a shared dataset runs as its page says."""

from __future__ import annotations

import subprocess
import sys

from tests.documents import ROOT


def test_shared_dataset() -> None:
    """Every worker trains on its shard of what the first one wrote, sent in a few hundred bytes."""
    done = subprocess.run(
        [sys.executable, "examples/shared_dataset.py", "--rows", "2000", "--workers", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    head, *workers = done.stdout.splitlines()
    assert int(head.split(", ")[1].split()[0]) < 800
    assert [line.split(",")[0] for line in workers] == ["w0: 1000 rows", "w1: 1000 rows"]
