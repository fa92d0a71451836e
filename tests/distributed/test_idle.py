"""A worker that waits uses no processor time."""

from __future__ import annotations

import os
import time

from mmrpc import rpc
from tests.distributed.workers import run

QUIET_S = 2.0


def cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system


def be_quiet(rank: int) -> float:
    rpc.rpc_sync(f"worker{1 - rank}", os.getpid)
    before = cpu_seconds()
    time.sleep(QUIET_S)
    return cpu_seconds() - before


def test_idle_workers_burn_no_core() -> None:
    """torch's shared-memory transport would keep one busy all the time."""
    assert max(run(be_quiet, 2)) < QUIET_S / 4
