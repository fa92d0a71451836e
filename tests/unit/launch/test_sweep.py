"""Processes of a run are found by what they inherited, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mmrpc.launch import sweep
from mmrpc.launch.guard import Guard

_SLEEPER = (
    "import signal; print('up', flush=True); signal.signal(15, signal.SIG_IGN); signal.pause()"
)
_PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True,"
    " stdout=subprocess.PIPE)\n"
    "child.stdout.readline()\n"
    "print(child.pid, flush=True)\n"
    "sys.stdin.read()\n"
)


def _start(run_id: str, node: str, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *command],
        env={**os.environ, **sweep.mark(run_id, node)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def run_id() -> str:
    """A run that nobody else has."""
    return f"test-{os.getpid()}"


@pytest.fixture
def orphan(run_id: str) -> Iterator[int]:
    """PID of a process of node a, in another session, whose parent has ended."""
    parent = _start(run_id, "a", _PARENT, _SLEEPER)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.communicate("")
    assert os.path.exists(f"/proc/{pid}")
    yield pid
    with_orphan = f"/proc/{pid}"
    if os.path.exists(with_orphan):
        os.kill(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_orphan_in_another_session_is_killed(run_id: str, orphan: int) -> None:
    """It ignores SIGTERM, and nothing but its environment tells whose it is."""
    assert sweep.kill(run_id, "a") == {}
    assert not _is_running(orphan)


def test_others_are_left_alone(run_id: str, orphan: int) -> None:
    """Another run, and another node of the same run on the same machine."""
    assert sweep.kill(run_id, "b") == {}
    assert sweep.kill("another", "a") == {}
    assert sweep.kill(run_id[:-1], "a") == {}
    assert _is_running(orphan)


def test_a_run_is_not_found_in_somebodys_arguments(run_id: str) -> None:
    """Only the environment counts."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SLEEPER, f"MMRPC_RUN_ID={run_id}", "MMRPC_NODE=a"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    sweep.kill(run_id, "a")
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_the_caller_is_never_killed(run_id: str) -> None:
    """An agent may itself be part of an outer run."""
    program = f"from mmrpc.launch import sweep; print(sweep.kill({run_id!r}, 'a'))"
    process = _start(run_id, "a", program)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "{}\n")


def test_a_guard_acts_when_its_owner_lets_go(run_id: str, orphan: int) -> None:
    """It waits until then."""
    guard = Guard(run_id, "a")
    assert _is_running(orphan)
    guard.close()
    assert not _is_running(orphan)
