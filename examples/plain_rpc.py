"""Two processes that send plain tensors through torch's own RPC: what the demo compares with."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed.rpc as torch_rpc
from torch.distributed.rpc import internal as torch_internal


def read_all(x: torch.Tensor) -> float:
    """Reads every byte."""
    return x.sum().item()


def idle_share(pids: list[int], seconds: float) -> float:
    """The share of a core that a process takes, as the mean of some processes."""
    before = sum(map(_cpu_s, pids))
    time.sleep(seconds)
    return (sum(map(_cpu_s, pids)) - before) / seconds / len(pids)


class PlainPair:
    """A sender and a receiver under torch's own RPC.

    They are stopped while it is not their turn: torch's default transport polls, and would take
    the cores from whatever is measured in between.

    Args:
        directory: A directory for the rendezvous.
        transport: TensorPipe's transport; None for what torch chooses.
    """

    def __init__(self, directory: str, transport: str | None = None) -> None:
        options: dict[str, Any] = {"init_method": f"file://{directory}/plain-{transport}"}
        if transport is not None:
            options |= {"_transports": [transport], "_channels": ["basic"]}
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._processes = [
            context.Process(target=_sender, args=(options, theirs), daemon=True),
            context.Process(target=_receiver, args=(options,), daemon=True),
        ]
        for process in self._processes:
            process.start()
        theirs.close()

    def send(self, numel: int) -> tuple[float, int]:
        """Sends a float32 tensor of so many elements to be read; gives seconds and bytes."""
        with self._running():
            self._pipe.send(numel)
            return self._pipe.recv()

    def idle_share(self, seconds: float) -> float:
        """The share of a core that each takes while it has nothing to do."""
        with self._running():
            return idle_share([process.pid for process in self._processes], seconds)

    def __enter__(self) -> Self:
        self._pipe.recv()
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *exc: object) -> None:
        # A stopped process would not end, and would be waited for.
        self._signal(signal.SIGCONT)
        self._pipe.send(None)
        for process in self._processes:
            process.join(timeout=10)
            process.kill()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid, number)


def _join(options: dict[str, Any], rank: int) -> None:
    # torch warns of its own use of a process group at every start.
    warnings.filterwarnings("ignore", ".* as a ProcessGroup", UserWarning)
    torch_rpc.init_rpc(
        f"plain{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(**options),
    )


def _sender(options: dict[str, Any], pipe: Connection) -> None:
    _join(options, 0)
    pipe.send("ready")
    x = torch.empty(0)
    while (numel := pipe.recv()) is not None:
        if x.numel() != numel:
            x = torch.randn(numel)
        start = time.perf_counter()
        torch_rpc.rpc_sync("plain1", read_all, (x,))
        elapsed_s = time.perf_counter() - start
        pipe.send((elapsed_s, _message_nbytes(x)))
    torch_rpc.shutdown()


def _receiver(options: dict[str, Any]) -> None:
    _join(options, 1)
    torch_rpc.shutdown()


def _message_nbytes(x: torch.Tensor) -> int:
    call = torch_internal.PythonUDF(read_all, (x,), {})
    data, tensors = torch_internal.serialize(call)
    return len(data) + sum(tensor.nbytes for tensor in tensors)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
