"""The examples of training run, on small sizes, and say what they are to say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from examples import digits
from examples.plain_parameter_server import PlainServer, PlainTrainer
from mmrpc import rpc
from tests.distributed.workers import run
from tests.documents import ROOT

pytestmark = pytest.mark.timeout(180)


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", ROOT / "examples" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        # Unbuffered, each `write` of a process is seen by itself, between those of others.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_parameter_server() -> None:
    """The smallest program learns, and leaves a version."""
    printed = run_example("parameter_server.py", "100")
    losses = [float(text) for text in re.findall(r"worker1: step \d+, loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0] / 2
    lines = [line for line in printed.splitlines() if line.startswith("worker")]
    assert len(lines) == 2 * 3
    assert all(re.fullmatch(r"worker\d: step \d+, loss [\d.]+", line) for line in lines)
    assert "v000000000100.safetensors" in printed


def test_weight_sync() -> None:
    """Both actors end with the last version."""
    printed = run_example("weight_sync.py", "60")
    assert len(re.findall(r"actor \d: .*? ends at version 59, ", printed)) == 2


def test_sparse_embeddings() -> None:
    """Only the rows that occur are changed, and pushes stay small."""
    printed = run_example("sparse_embeddings.py", "20000")
    assert re.search(r"400 steps changed (4\d\d|500) of 20,000 rows", printed)
    assert all(int(n.replace(",", "")) < 1000 for n in re.findall(r"pushes of ([\d,]+) B", printed))


JOB = digits.Job(trainers=2, steps=60, hidden=32)


def work(rank: int, directory: str) -> Any:
    if rank == 0:
        return digits.run_server(JOB, directory)
    digits.run_trainer(JOB, rank - 1)
    return None


def work_plain(rank: int) -> Any:
    if rank == 0:
        server = digits.run_plain_server(JOB)
        rpc.shutdown()
        return digits.accuracy(server.module), type(server) is PlainServer
    digits.run_plain_trainer(JOB, rank - 1)
    rpc.shutdown()
    return PlainTrainer(digits.classifier(JOB), digits.SERVER).message_nbytes()


def test_digits_both_ways(tmp_path) -> None:
    """The job learns the same through mapped memory and through torch's own RPC."""
    names = ["ps0", "trainer0", "trainer1"]
    ours, *_ = run(work, 3, str(tmp_path), names=names)
    (accuracy, _), *nbytes = run(work_plain, 3, names=names, shutdown=False)
    assert ours.accuracy == pytest.approx(accuracy, abs=0.02)
    assert ours.accuracy > 0.6
    assert ours.nbytes_per_step < 1000 < min(nbytes)
