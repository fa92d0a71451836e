"""Launched RPC jobs: init_rpc() without arguments, the handshake's verdict, a resumed server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import assert_nobody_left, launching, one_role

RPC_JOB = '''
import os, sys, time
import torch
import mmrpc.rpc as rpc
from mmrpc import MemoryMappedTensor

def whoami():
    return rpc.get_worker_info().name

def everyone():
    """Rank 0 asks all others for their names."""
    rpc.init_rpc()
    if os.environ["RANK"] == "0":
        names = ["w%d" % i for i in range(1, int(os.environ["WORLD_SIZE"]))]
        assert [rpc.rpc_sync(name, whoami) for name in names] == names
        print("all answered", len(names))
    rpc.shutdown()

def resume():
    """Counts attempts in a mapped file; the first ends in the middle."""
    rpc.init_rpc()
    if os.environ["RANK"] == "0":
        if os.environ["MMRPC_RESTARTS"] == "0":
            state = MemoryMappedTensor.zeros(2, filename="state")
        else:
            state = MemoryMappedTensor.from_filename("state", torch.float32, [2])
        state += 1
        assert rpc.rpc_sync("w1", torch.sum, (state,)).item() == 2 * state[0].item()
        print("state", state.tolist(), flush=True)
        if os.environ["MMRPC_RESTARTS"] == "0":
            os._exit(3)
    rpc.shutdown()

def loses():
    """Rank 0 loses rank 1, which takes its time to end."""
    from mmrpc.errors import PeerLostError
    if os.environ["RANK"] == "0":
        raise PeerLostError("it ended", peer="w1")
    time.sleep(0.5)
    if sys.argv[1:] == ["fail"]:
        sys.exit(7)

def torchrun():
    """Nothing but torchrun's own variables is there."""
    rpc.init_rpc()
    if os.environ["RANK"] == "0":
        print("answered", rpc.rpc_sync("worker1", whoami), flush=True)
    rpc.shutdown()

if __name__ == "__main__":
    import rpc_job
    rpc_job.torchrun()
'''


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A directory with the job."""
    (tmp_path / "rpc_job.py").write_text(RPC_JOB)
    return tmp_path


def _shared(directory: Path, name: str) -> str:
    (directory / name).mkdir(exist_ok=True)
    return str(directory / name)


def _with_mount(directory: Path, target: str, on_b: str = "m") -> dict[str, Any]:
    config = one_role(target, {"a": 1, "b": 2})
    config["mounts"] = {"m": {"access": "write"}}
    config["nodes"] = {
        "a": {"mounts": {"m": _shared(directory, "m")}},
        "b": {"mounts": {"m": _shared(directory, on_b)}},
    }
    return config


@pytest.mark.timeout(300)
def test_sixteen_workers_meet(job: Path) -> None:
    """On one node, by the port that its agent has chosen."""
    with launching(job, one_role("rpc_job:everyone", 16)) as launch:
        assert launch.code(280) == 0, launch.text
        assert "w0  | all answered 15" in launch.lines
    assert_nobody_left(job)


def test_what_was_proven_is_shown_also_if_its_teller_is_not(job: Path) -> None:
    """The table comes from rank 0; of its other lines none is shown."""
    config = _with_mount(job, "rpc_job:everyone")
    config["logs"] = {"tee": ["w2"]}
    with launching(job, config) as launch:
        assert launch.code() == 0, launch.text
        rows = [
            line.split(" | mmrpc: ")[1].split() for line in launch.lines if " | mmrpc: " in line
        ]
        assert rows[0][:4] == ["3", "workers", "have", "met,"]
        assert [row[1] for row in rows if row[0] == "m"] == ["a", "b"]
        assert "all answered" not in launch.text


def test_what_was_not_proven_is_one_screen(job: Path) -> None:
    """No traceback; the mount, the node, both paths and the key to mend."""
    with launching(job, _with_mount(job, "rpc_job:everyone", on_b="other")) as launch:
        assert launch.code() == 1
        assert "Traceback" not in launch.text
        last = launch.lines[-1]
        assert last.startswith("  | mmrpc: on b: ")
        for part in ("(mount 'm')", f"{job}/other", f"{job}/m", "nodes.b.mounts.m"):
            assert part in last
    assert_nobody_left(job)


@pytest.mark.parametrize(
    ("ends", "worker", "code"), [("fail", "w1", 7), ("well", "w0", 1)], ids=["failed", "left"]
)
def test_a_worker_that_lost_another_is_not_to_blame(
    job: Path, ends: str, worker: str, code: int
) -> None:
    """The launcher tells of the one that was lost, even if it ends later, unless it ends well."""
    with launching(job, one_role("rpc_job:loses"), "--", ends) as launch:
        assert launch.code() == code
        assert any(line.startswith(f"on a: worker {worker} failed") for line in launch.lines)


def test_a_server_resumes_from_its_mapped_file(job: Path) -> None:
    """The second gang meets at the same fixed port as the first, whose end was sudden."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = one_role("rpc_job:resume", {"a": 1, "b": 1}, master={"node": "a", "port": port})
    config["launch"] = {"max_restarts": 1, "grace_s": 5}
    with launching(job, config) as launch:
        assert launch.code() == 0, launch.text
        assert {"w0 | state [1.0, 1.0]", "w0 | state [2.0, 2.0]"} <= set(launch.lines)
    assert_nobody_left(job)


def test_torchruns_environment_is_enough(job: Path) -> None:
    """init_rpc() without arguments and without any launcher of ours."""
    environment = {name: value for name, value in os.environ.items() if "MMRPC_" not in name}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "rpc_job.py"),
        ],
        cwd=job,
        env={**environment, "MMRPC_TEST_RUN": os.environ["MMRPC_TEST_RUN"]},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "answered worker1" in done.stdout
