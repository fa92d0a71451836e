"""Peers that die or do not answer, and groups that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch.distributed.rpc

from mmrpc import errors, rpc
from mmrpc.core.resolver import get_resolver
from mmrpc.testing import free_port
from tests.distributed.workers import by_every_way, outcome, run

_release = threading.Event()
_asked = threading.Event()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_release() -> None:
    _release.wait(60)


def release() -> None:
    _release.set()


def ask() -> int:
    _asked.set()
    return len(threading.enumerate())


def wait_until_asked() -> None:
    _asked.wait(60)


def lose_a_peer(rank: int, way: str, when: str) -> dict[str, Any]:
    if rank == 1 and when == "while it works":
        wait_for_release()
    if rank == 1:
        return {"shutdown": outcome(rpc.shutdown)}
    if rank == 2:
        rpc.rpc_sync("worker0", wait_until_asked)
        return {"shutdown": outcome(rpc.shutdown)}
    calls = {
        "rpc_sync": lambda: rpc.rpc_sync("worker1", die),
        "rpc_async": lambda: rpc.rpc_async("worker1", die).wait(),
        "remote": lambda: rpc.remote("worker1", die).to_here(),
    }
    found = {"call": outcome(calls[way]), "next": outcome(lambda: rpc.rpc_sync("worker1", ask))}
    found["other"] = rpc.rpc_sync("worker2", len, ([1],))
    ask()
    found["shutdown"] = outcome(rpc.shutdown)
    found["node after"] = get_resolver().node
    return found


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("when", ["while it works", "while it waits in shutdown"])
def test_a_peer_that_dies_is_named(way: str, when: str) -> None:
    """By the call, by the next call, and by the shutdown of every worker that is left."""
    found = run(lose_a_peer, 3, way, when, may_die=["worker1"], shutdown=False)
    caller = found[0]
    assert caller["call"].cls is errors.PeerLostError
    assert caller["call"].peer == "worker1"
    assert caller["call"].function == "die"
    assert caller["call"].elapsed_s > 0
    assert caller["next"].cls is errors.PeerLostError
    assert caller["other"] == 1
    for worker in (0, 2):
        assert found[worker]["shutdown"].cls is errors.PeerLostError
        assert found[worker]["shutdown"].peer == "worker1"
    assert caller["node after"] is None


def call_slowly(rank: int) -> dict[str, Any]:
    if rank == 1:
        return {}
    rref = rpc.remote("worker1", wait_for_release)
    found = {
        "rpc_sync": outcome(lambda: rpc.rpc_sync("worker1", wait_for_release, timeout=0.2)),
        "rpc_async": outcome(
            lambda: rpc.rpc_async("worker1", wait_for_release, timeout=0.2).wait()
        ),
        "remote": outcome(lambda: rref.to_here(timeout=0.2)),
        "proxy": outcome(lambda: rref.rpc_sync(timeout=0.2).nothing()),
    }
    rpc.rpc_sync("worker1", release)
    found["after"] = by_every_way(rpc, "worker1", len, [1, 2])
    return found


def test_a_call_that_takes_too_long_is_a_typed_timeout() -> None:
    """It names peer, function and limit; the peer answers the next call."""
    found = run(call_slowly, 2)[0]
    for way, function in (
        ("rpc_sync", "wait_for_release"),
        ("rpc_async", "wait_for_release"),
        ("remote", "wait_for_release"),
        ("proxy", "RRef.nothing"),
    ):
        error = found[way]
        assert error.cls is errors.RpcTimeoutError, way
        assert (error.peer, error.function) == ("worker1", function)
        assert error.elapsed_s >= 0.1
        assert error.timeout_s == pytest.approx(0.2)
    assert found["after"] == {"rpc_sync": 2, "rpc_async": 2, "remote": 2}


def leave_while_others_work(rank: int) -> Any:
    if rank == 0:
        return None  # goes to shutdown at once, where it is to go on serving
    return [rpc.rpc_sync("worker0", len, ([1] * n,)) for n in range(50)]


def test_a_worker_in_shutdown_serves_those_that_still_work() -> None:
    """Nobody leaves before all have come."""
    assert run(leave_while_others_work, 3) == [None, list(range(50)), list(range(50))]


def leave_with_a_limit(rank: int, early: int) -> Any:
    if rank == early:
        return outcome(lambda: rpc.shutdown(timeout=1))
    peer = f"worker{early}"
    error = outcome(lambda: rpc.rpc_sync(peer, wait_for_release, timeout=50))
    return error, outcome(rpc.shutdown)


@pytest.mark.parametrize("early", [0, 1])
def test_a_shutdown_with_a_limit_names_who_is_missing(early: int) -> None:
    """The worker that waited leaves alone; the one that came late learns that it is gone."""
    found = run(leave_with_a_limit, 2, early, shutdown=False)
    late = f"worker{1 - early}"
    assert found[early].cls is errors.RpcTimeoutError
    assert (found[early].peer, found[early].timeout_s) == (late, 1)
    call, shutdown = found[1 - early]
    assert call.cls is errors.PeerLostError
    assert shutdown.cls is errors.PeerLostError
    assert shutdown.peer == f"worker{early}"


def come_back(rank: int, port: int) -> Any:
    before = get_resolver().node
    rpc.shutdown()
    rpc.shutdown()
    after = get_resolver().node
    uninitialized = outcome(lambda: rpc.rpc_sync("worker1", len, ([],)))
    os.environ.update(
        MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", MMRPC_NODE=f"node{rank}"
    )
    rpc.init_rpc()
    again = rpc.rpc_sync(f"worker{1 - rank}", get_node)
    twice = outcome(rpc.init_rpc)
    rpc.shutdown()
    for thread in threading.enumerate():
        if thread.name.startswith("mmrpc-call"):
            thread.join(30)
    threads = [thread.name for thread in threading.enumerate() if "mmrpc" in thread.name]
    return before, after, uninitialized.message, again, twice.cls, threads


def get_node() -> str | None:
    return get_resolver().node


def test_a_group_can_end_and_another_begin() -> None:
    """Shutdown twice is once; init_rpc without arguments reads the environment."""
    for rank, found in enumerate(run(come_back, 2, free_port(), shutdown=False)):
        before, after, uninitialized, again, twice, threads = found
        assert (before, after) == (f"worker{rank}", None)
        assert "not been initialized" in uninitialized
        assert again == f"node{1 - rank}"
        assert twice is RuntimeError
        assert threads == []


def leave_at_once(rank: int) -> Any:
    return outcome(lambda: rpc.shutdown(graceful=False))


def test_a_worker_can_leave_without_waiting() -> None:
    """With graceful=False."""
    assert run(leave_at_once, 2, shutdown=False) == [None, None]


def leave_with_a_call_running(rank: int) -> Any:
    if rank == 0:
        pending = rpc.rpc_async("worker1", run_until_released)
        rpc.rpc_sync("worker1", wait_until_asked)
        left = outcome(rpc.rpc_async("worker1", leave_now).wait)
        return outcome(pending.wait), left, outcome(rpc.shutdown)
    _left.wait(60)
    release()
    _ran.wait(60)
    return None


_left, _ran = threading.Event(), threading.Event()


def run_until_released() -> str:
    ask()
    _release.wait(60)
    _ran.set()
    return "done"


def leave_now() -> None:
    rpc.shutdown(graceful=False)
    _left.set()


def test_a_call_may_outlive_its_workers_group() -> None:
    """The worker left; the call's end does no harm, and its caller is told at once."""
    pending, left, shutdown = run(leave_with_a_call_running, 2, shutdown=False)[0]
    assert pending.cls is errors.PeerLostError
    assert left.cls is errors.PeerLostError
    assert shutdown.cls is errors.PeerLostError


def never_return() -> None:
    threading.Event().wait()


def leave_with_a_call_that_never_returns(rank: int, graceful: bool) -> Any:
    found = None
    if rank == 0:
        found = outcome(lambda: rpc.rpc_sync("worker1", never_return, timeout=0.5)).cls
        outcome(lambda: rpc.rpc_sync("worker1", ask))  # it may leave before it has answered
    else:
        wait_until_asked()
    rpc.shutdown(graceful)
    return found


@pytest.mark.parametrize("graceful", [True, False])
def test_a_call_that_never_returns_keeps_no_worker(graceful: bool) -> None:
    """Its worker leaves the group and its process ends."""
    found = run(leave_with_a_call_that_never_returns, 2, graceful, shutdown=False)
    assert found == [errors.RpcTimeoutError, None]


PROGRAM_WITHOUT_SHUTDOWN = """
import sys
import torch
from mmrpc import rpc

rank, port, end = int(sys.argv[1]), sys.argv[2], sys.argv[3]
options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
print(rpc.rpc_sync(f"w{1 - rank}", torch.add, (torch.ones(1), 1)).item(), flush=True)
sys.stdin.read()  # until both are here
if end == "raise":
    raise ValueError("of the program")
sys.exit(5)
"""


@pytest.mark.parametrize(("end", "code"), [("exit", 5), ("raise", 1)])
def test_a_program_that_ends_without_shutdown_keeps_its_exit_code(end: str, code: int) -> None:
    """Torch's agent would abort it; what it died of is told."""
    port = str(free_port())
    command = [sys.executable, "-c", PROGRAM_WITHOUT_SHUTDOWN]
    programs = [
        subprocess.Popen(
            [*command, rank, port, end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "2.0\n"
        for program in programs:
            _, told = program.communicate(timeout=60)
            assert program.returncode == code, told
            assert ("ValueError: of the program" in told) == (end == "raise")
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def leave_by_either(rank: int, by_torch: int) -> None:
    rpc.rpc_sync(f"worker{1 - rank}", len, ([],))
    torch.distributed.rpc.shutdown() if rank == by_torch else rpc.shutdown()


@pytest.mark.parametrize("by_torch", [0, 1])
def test_a_worker_may_leave_through_torch(by_torch: int) -> None:
    """Its own shutdown and ours wait for each other."""
    assert run(leave_by_either, 2, by_torch, shutdown=False) == [None, None]
