"""run_workers itself: results, failures, deadlines, and that nobody stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from mmrpc import rpc
from mmrpc.testing import WorkerFailedError, run_workers
from tests.distributed.workers import run


def describe(rank: int, word: str) -> Any:
    options = rpc.get_rpc_timeout()
    return rank, word, rpc.get_worker_info().name, os.environ.get("WORD"), options


def fail_in_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("worker one is wrong")
    rpc.rpc_sync("worker1", wait_for_ever, timeout=0)


def wait_for_ever() -> None:
    threading.Event().wait()


def die_in_one(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()
    return "not reached"


def never_end(rank: int, directory: str) -> None:
    with open(f"{directory}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    threading.Event().wait()


def return_a_lock(rank: int) -> Any:
    return threading.Lock()


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_come_by_rank_with_names_environment_and_options() -> None:
    """Spawned processes, as a user has them by default."""
    found = run_workers(
        describe, 2, "w", names=["a", "b"], env={"WORD": "x"}, options={"rpc_timeout": 7}
    )
    assert found == [(0, "w", "a", "x", 7.0), (1, "w", "b", "x", 7.0)]


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    """Not the failures that follow from it in other workers."""
    with pytest.raises(WorkerFailedError, match="ValueError: worker one is wrong") as caught:
        run(fail_in_one, 2)
    assert caught.value.worker == "worker1"
    assert "in fail_in_one" in str(caught.value)


def test_a_worker_that_dies_is_named_with_its_exit_code() -> None:
    """The others do not run on."""
    with pytest.raises(WorkerFailedError) as caught:
        run(die_in_one, 2)
    assert (caught.value.worker, caught.value.exit_code) == ("worker1", -signal.SIGKILL)


def test_the_deadline_ends_everything(tmp_path: Any) -> None:
    """It names who was still running, and they are gone."""
    with pytest.raises(WorkerFailedError, match="still running after") as caught:
        run(never_end, 2, str(tmp_path), timeout_s=4)
    assert caught.value.worker == "worker0, worker1"
    for path in tmp_path.iterdir():
        assert not is_running(int(path.read_text()))


def test_a_result_that_does_not_pickle_is_a_failure() -> None:
    """With what pickling said."""
    with pytest.raises(WorkerFailedError, match=r"cannot pickle '_thread\.lock'"):
        run(return_a_lock, 1)


def test_workers_end_when_their_starter_is_killed(tmp_path: Any) -> None:
    """Even by SIGKILL."""
    program = (
        "from mmrpc.testing import run_workers\n"
        "from tests.distributed.test_testing import never_end\n"
        "if __name__ == '__main__':\n"
        f"    run_workers(never_end, 1, {str(tmp_path)!r})\n"
    )
    script = tmp_path / "script.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    starter = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        note = tmp_path / "0"
        deadline = time.monotonic() + 60
        while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        worker = int(note.read_text())
    finally:
        starter.kill()
        starter.wait(30)
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(worker)
