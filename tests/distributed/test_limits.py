"""Workers with few descriptors, without /proc, and without /dev/shm."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from typing import Any

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors, rpc
from mmrpc.testing import free_port
from tests.distributed.workers import outcome, run
from tests.needs import needs

LARGE = 1 << 20
ENV = {"MMRPC_SHARE_ABOVE_BYTES": str(1 << 20)}
FEW = 64
DEADLINE_S = 100
_taken: list[int] = []


def take_all_descriptors() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, most))
    with contextlib.suppress(OSError):
        while True:
            _taken.append(os.open(os.devnull, os.O_RDONLY))


def give_them_back() -> None:
    while _taken:
        os.close(_taken.pop())


def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def totals(tensors: list[torch.Tensor]) -> float:
    return sum(map(total, tensors))


def large() -> torch.Tensor:
    return torch.ones(LARGE)


def mapped() -> torch.Tensor:
    return MemoryMappedTensor.from_tensor(torch.ones(80 * LARGE))


def callee_without_descriptors(rank: int, directory: str) -> Any:
    if rank:
        return None
    in_file = MemoryMappedTensor.from_tensor(torch.ones(8), filename=f"{directory}/x")
    rpc.rpc_sync("worker1", take_all_descriptors)
    arguments = {"file": in_file, "memory": mapped()[:8], "plain": torch.ones(LARGE)}
    found = {
        name: outcome(lambda tensor=tensor: rpc.rpc_sync("worker1", total, (tensor,)))
        for name, tensor in arguments.items()
    }
    found["result"] = outcome(lambda: rpc.rpc_sync("worker1", mapped))
    found["plain result"] = total(rpc.rpc_sync("worker1", large))
    rpc.rpc_sync("worker1", give_them_back)
    return found, [rpc.rpc_sync("worker1", total, (one,)) for one in arguments.values()]


def test_a_worker_that_is_out_of_descriptors_says_so(tmp_path: Any) -> None:
    """The caller gets the reason, not another one, and the worker goes on serving."""
    found, after = run(callee_without_descriptors, 2, str(tmp_path), env=ENV)[0]
    for what in ("file", "memory", "plain", "result"):
        assert issubclass(found[what].cls, errors.PathError), found[what]
        assert "too many open files" in found[what].message
        assert found[what].node == ("worker1" if what != "result" else None)
    assert found["plain result"] == LARGE
    assert after == [8, 8, LARGE]


def with_few_descriptors(rank: int, directory: str) -> Any:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))
    rpc.rpc_sync(f"worker{1 - rank}", len, ([],))
    if rank:
        return None
    tensors = [
        MemoryMappedTensor.from_tensor(torch.ones(8), filename=f"{directory}/{i}")
        for i in range(2 * FEW)
    ]
    tensors += [MemoryMappedTensor.from_tensor(torch.ones(8)) for _ in range(2 * FEW)]
    plain = [torch.ones(LARGE) for _ in range(20)]
    return [rpc.rpc_sync("worker1", totals, (some,)) for some in (tensors, plain, tensors, plain)]


def test_few_descriptors_are_enough(tmp_path: Any) -> None:
    """For many more tensors, mapped and plain, in one call."""
    found = run(with_few_descriptors, 2, str(tmp_path), env=ENV)[0]
    assert found == [32.0 * FEW, 20.0 * LARGE] * 2


PROGRAM = """
import os, sys
import torch
from mmrpc import MemoryMappedTensor, errors, rpc

rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
peer = f"w{1 - rank}"
in_file = MemoryMappedTensor.from_filename(f"{directory}/x", torch.float32, [8])
for tensor in (in_file, torch.ones(1 << 20), MemoryMappedTensor.from_tensor(torch.ones(8))):
    for _ in range(3):
        try:
            print(rpc.rpc_sync(peer, torch.sum, (tensor,)).item(), end=" ")
        except errors.MmrpcError as error:
            print(type(error).__name__, end=" ")
rpc.shutdown()
"""


def run_both(tmp_path: Any, before: str) -> list[str]:
    """What two workers print, in a mount namespace that was prepared by a shell command."""
    port = str(free_port())
    MemoryMappedTensor.from_tensor(torch.ones(8), filename=tmp_path / "x")
    script = f'{before}; for r in 0 1; do "$@" $r {port} {tmp_path} >{tmp_path}/out$r & done; wait'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **ENV},
    )
    assert done.returncode == 0, done.stderr
    return [(tmp_path / f"out{rank}").read_text().strip() or done.stderr for rank in (0, 1)]


ALL_RIGHT = f"{'8.0 ' * 3}{'1048576.0 ' * 3}{'8.0 ' * 3}".strip()


@needs("namespaces")
@pytest.mark.parametrize(
    "before",
    [
        "umount -l /dev/shm",
        "mount -t tmpfs -o size=64k none /dev/shm && head -c 64k /dev/zero >/dev/shm/full",
        "mount -t tmpfs -o ro none /dev/shm",
    ],
)
def test_no_shared_memory_directory_is_needed(tmp_path: Any, before: str) -> None:
    """Memory is shared without it: absent, full or read-only, all arrives."""
    assert run_both(tmp_path, before) == [ALL_RIGHT] * 2


@needs("namespaces")
def test_without_proc_no_reference_is_trusted(tmp_path: Any) -> None:
    """Nothing shows that two processes are of one host: a typed error, and values arrive."""
    refused = "NotSharedError " * 3
    expected = f"{refused}{'1048576.0 ' * 3}{refused}".strip()
    assert run_both(tmp_path, "umount -l /proc") == [expected] * 2
