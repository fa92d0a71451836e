"""Processes that take part in a handshake, each as a host of its own if it is told so."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, Self

from mmrpc.testing import free_port
from tests.forked import Forked, mount

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
        self.ranks: dict[int, Forked] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self,
        rank: int,
        node: str,
        *,
        binds: dict[str, str] | None = None,
        read_only: list[str] | None = None,
        stall: str | None = None,
        talk: bool = False,
    ) -> Forked:
        """Starts one rank.

        Args:
            rank: Its number.
            node: The node that it says it is on.
            binds: Makes it a host with a view of its own: directories to where they are mounted.
            read_only: Places that are mounted read-only there.
            stall: Name of a step of the nonce that blocks.
            talk: Whether it goes on to RPC, and sends a tensor that rank 0 writes to the mount to
                rank 1.
        """
        view = (binds or {}, read_only or [])
        task = (self.config, node, rank, self.world_size, self.port)
        process = Forked(_be, view, task, stall, talk, mounts=binds is not None)
        self.ranks[rank] = self._stack.enter_context(process)
        return process

    def outcomes(self) -> list[dict[str, Any]]:
        """Waits for all ranks, and gives what each told."""
        return [self.ranks[rank].result() for rank in sorted(self.ranks)]


def wait_for(found: Any, what: str) -> Any:
    """Polls until something is found, for what only the file system can tell."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not (result := found()):
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)
    return result


def _be(
    view: tuple[dict[str, str], list[str]],
    task: tuple[dict[str, Any], str, int, int, int],
    stall: str | None,
    talk: bool,
) -> dict[str, Any]:
    """What one rank comes to."""
    from mmrpc.config import parse_config
    from mmrpc.errors import MmrpcError
    from mmrpc.rpc.handshake import join, nonce

    binds, read_only = view
    for source, target in binds.items():
        mount("--bind", source, target)
    for path in read_only:
        mount("-o", "remount,bind,ro", path)
    if stall:
        setattr(nonce, stall, lambda *_, **__: signal.pause())
    config, node, rank, world_size, port = task
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        cluster = parse_config(config)
        if talk:
            return {"answer": _talk(cluster, node, rank, world_size)}
        joined = join(cluster, node, f"w{rank}", rank, world_size)
        return {"verdict": joined.verdict.model_dump(mode="json")}
    except MmrpcError as error:
        told = {"error": type(error).__name__, "text": str(error), "node": error.node}
        return told | {name: getattr(error, name, None) for name in ("rank", "mount", "path")}


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
