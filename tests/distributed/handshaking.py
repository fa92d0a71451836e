"""Processes that take part in a handshake, each as a host of its own if it is told so.

As a program it is one rank: ``python handshaking.py SPEC``, with the spec and the outcome in
JSON. `Meeting` starts ranks and collects what came of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mmrpc.testing import free_port

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 90.0


class Meeting:
    """Starts the ranks of one handshake; use as a context manager, which kills what is left.

    Args:
        config: The cluster, as in a file; its deadlines are for a machine that is busy.
        world_size: How many ranks are awaited.
    """

    def __init__(self, config: dict[str, Any], world_size: int) -> None:
        rpc = {"handshake_timeout_s": 60, "mount_timeout_s": 15, "visibility_timeout_s": 2}
        self.config = {**config, "rpc": {**rpc, **config.get("rpc", {})}}
        self.world_size = world_size
        self.port = free_port()
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.communicate()

    def start(
        self, rank: int, node: str, *, binds: dict[str, str] | None = None, **spec: Any
    ) -> subprocess.Popen[str]:
        """Starts one rank.

        Args:
            rank: Its number.
            node: The node that it says it is on.
            binds: Makes it a host with a view of its own: directories to where they are mounted.
            **spec: ``read_only``: mounts to make so; ``stall`` and ``talk``: see `main`.
        """
        told = {"config": self.config, "node": node, "rank": rank, **spec}
        told["world_size"] = self.world_size
        command = [sys.executable, __file__, json.dumps(told)]
        if binds is not None:
            steps = [f"mount --bind {source} {target}" for source, target in binds.items()]
            steps += [f"mount -o remount,bind,ro {path}" for path in spec.get("read_only", [])]
            script = " && ".join([*steps, 'exec "$@"'])
            command = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
        env = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }
        pipe = subprocess.PIPE
        self.processes[rank] = subprocess.Popen(command, env=env, stdout=pipe, text=True)
        return self.processes[rank]

    def outcome(self, rank: int) -> dict[str, Any]:
        """Waits for a rank, and gives what it told."""
        out, _ = self.processes[rank].communicate(timeout=_TIMEOUT_S)
        told: dict[str, Any] = json.loads(out.splitlines()[-1])
        return told

    def outcomes(self) -> list[dict[str, Any]]:
        """Waits for all ranks, and gives what each told."""
        return [self.outcome(rank) for rank in sorted(self.processes)]


def wait_for(found: Any, what: str) -> Any:
    """Polls until something is found, for what only the file system can tell."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not (result := found()):
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)
    return result


def _stall(where: str) -> None:
    import signal

    from mmrpc.rpc.handshake import nonce

    def wait(*_: Any, **__: Any) -> None:
        signal.pause()

    setattr(nonce, where, wait)


def main() -> None:
    """One rank.

    ``stall`` blocks a step, ``talk`` goes on to RPC and sends a tensor that rank 0 writes to the
    mount to rank 1.
    """
    spec = json.loads(sys.argv[1])
    from mmrpc.config import parse_config
    from mmrpc.errors import MmrpcError
    from mmrpc.rpc.handshake import join

    if spec.get("stall"):
        _stall(spec["stall"])
    rank, world_size, node = spec["rank"], spec["world_size"], spec["node"]
    started = time.monotonic()
    told: dict[str, Any] = {}
    try:
        cluster = parse_config(spec["config"])
        if spec.get("talk"):
            told["answer"] = _talk(cluster, node, rank, world_size)
        else:
            joined = join(cluster, node, f"w{rank}", rank, world_size)
            told["verdict"] = joined.verdict.model_dump(mode="json")
    except MmrpcError as error:
        told = {"error": type(error).__name__, "text": str(error), "node": error.node}
        told |= {name: getattr(error, name, None) for name in ("rank", "mount", "path")}
    told["elapsed_s"] = time.monotonic() - started
    print(json.dumps(told))


def _talk(cluster: Any, node: str, rank: int, world_size: int) -> Any:
    import torch

    import mmrpc
    from mmrpc import rpc

    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, cluster=cluster, node=node)
    report = rpc.path_report()
    answer: Any = [[m.node, m.proof] for m in report.mounts]
    if rank == 0:
        path = os.path.join(cluster.nodes[node].mounts["data"], "x")
        tensor = mmrpc.MemoryMappedTensor.from_tensor(torch.arange(6.0), filename=path)
        answer = [*answer, rpc.rpc_sync("w1", _add_one, (tensor,)), tensor.tolist()]
    rpc.shutdown()
    return answer


def _add_one(tensor: Any) -> str:
    tensor += 1
    return str(tensor.filename)


if __name__ == "__main__":
    # Functions that are sent are found by their module's name on the other side.
    sys.modules["tests.distributed.handshaking"] = sys.modules["__main__"]
    _add_one.__module__ = "tests.distributed.handshaking"
    main()
