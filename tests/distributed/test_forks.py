"""Processes that are forked from a worker: they are no workers, and end as they want to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from mmrpc import MemoryMappedTensor, rpc
from mmrpc.core.resolver import get_resolver
from mmrpc.testing import free_port
from tests.distributed.workers import outcome, run

LARGE = 1 << 20
ENV = {"MMRPC_SHARE_ABOVE_BYTES": str(1 << 20)}
DEADLINE_S = 60


def in_fork(fn: Callable[[], Any]) -> str:
    """What a function gives in a forked process, as text."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(DEADLINE_S)
        os.write(writes, repr(fn()).encode())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        found = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, "it hangs or has crashed"
    return found


def call_and_leave() -> Any:
    return (
        outcome(lambda: rpc.rpc_sync("worker1", len, ([],))),
        outcome(rpc.shutdown),
        get_resolver().node,
    )


def begin() -> Any:
    return outcome(lambda: rpc.init_rpc("alone", rank=0, world_size=1))


def fork(rank: int, fn: Callable[[], Any]) -> Any:
    peer = f"worker{1 - rank}"
    mapped = MemoryMappedTensor.from_tensor(torch.ones(4))
    kept = rpc.rpc_sync(peer, torch.add, (torch.ones(LARGE), 1))
    found = in_fork(fn)
    again = rpc.rpc_sync(peer, torch.add, (mapped, kept[:4]))
    return found, again.tolist(), float(kept.sum())


def test_a_forked_process_is_no_worker() -> None:
    """Its calls fail at once, its shutdown does nothing, and its parent goes on."""
    for found, again, kept in run(fork, 2, call_and_leave, env=ENV):
        assert "RPC has not been initialized" in found
        assert found.endswith(", None, None)")
        assert (again, kept) == ([3.0] * 4, 2 * LARGE)


def test_a_forked_process_can_not_become_one() -> None:
    """torch keeps what it had of the parent's group; a typed error says how to start it."""
    for found, *_ in run(fork, 2, begin, env=ENV):
        assert "RpcError" in found
        assert "forked from a worker" in found


FORKING = """
import os, sys
from mmrpc import rpc

rank, port = int(sys.argv[1]), sys.argv[2]
options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
rpc.rpc_sync(f"w{1 - rank}", len, ([],))
pid = os.fork()
if pid == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
rpc.rpc_sync(f"w{1 - rank}", len, ([],))
rpc.shutdown()
"""


def test_a_forked_process_ends_as_any_other() -> None:
    """Through Python's own end, with its exit code; it tears nothing of its parent down."""
    port = str(free_port())
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", FORKING, rank, port], stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    try:
        for program in programs:
            _, told = program.communicate(timeout=DEADLINE_S)
            assert program.returncode == 0, told
    finally:
        for program in programs:
            program.kill()
            program.communicate()
