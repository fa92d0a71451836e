"""Helpers for tests of programs that use mmrpc; importable without pytest.

`run_workers` runs a function in RPC processes on this machine, with a deadline;
`MountConformance` tests a kind of mount.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

    from mmrpc.conformance import MountConformance

__all__ = ["MountConformance", "WorkerFailedError", "free_port", "run_workers"]


class WorkerFailedError(AssertionError):
    """A worker of `run_workers` raised, died, or did not end in time.

    Attributes:
        worker: Name of the worker.
        exit_code: Its exit code, negative for a signal; None if it was still running.
    """

    def __init__(self, worker: str, text: str, exit_code: int | None = None) -> None:
        super().__init__(f"{worker}: {text}")
        self.worker = worker
        self.exit_code = exit_code


def free_port() -> int:
    """Gives a TCP port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_workers(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout_s: float = 120.0,
    names: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    init: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    may_die: Sequence[str] = (),
    shutdown: bool = True,
    start_method: str = "spawn",
) -> list[Any]:
    """Runs ``fn(rank, *args)`` in n RPC workers on this machine.

    Each worker joins the group before the function, and leaves it gracefully after it. All
    processes have ended when this returns or raises.

    Args:
        fn: A function that the processes can import.
        n: How many workers.
        *args: Further arguments; they are pickled.
        timeout_s: Seconds until everything is killed.
        names: Names of the workers. Defaults to ``worker0``, ``worker1``, ...
        env: Environment variables for the workers.
        init: Keyword arguments for `mmrpc.rpc.init_rpc`.
        options: Keyword arguments for `mmrpc.rpc.TensorPipeRpcBackendOptions`.
        may_die: Workers whose death is part of the test; their result is None.
        shutdown: Whether to leave the group after the function; if not, the function does it.
        start_method: One of `multiprocessing`'s: ``spawn``, or ``forkserver`` to import torch
            once only.

    Returns:
        What the function returned in each worker, by rank.

    Raises:
        WorkerFailedError: With the traceback of the first worker that failed.
    """
    names = list(names) if names is not None else [f"worker{rank}" for rank in range(n)]
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(["mmrpc.rpc"])
    task = _Task(
        fn, args, n, free_port(), dict(env or {}), dict(init or {}), dict(options or {}), shutdown
    )
    workers = [_Worker.start(context, task, rank, name) for rank, name in enumerate(names)]
    try:
        return _collect(workers, time.monotonic() + timeout_s, timeout_s, set(may_die))
    finally:
        for worker in workers:
            worker.stop()


@dataclass(frozen=True)
class _Task:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    port: int
    env: dict[str, str]
    init: dict[str, Any]
    options: dict[str, Any]
    shutdown: bool


@dataclass
class _Worker:
    name: str
    process: BaseProcess
    answers: connection.Connection

    @classmethod
    def start(cls, context: BaseContext, task: _Task, rank: int, name: str) -> _Worker:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(  # type: ignore[attr-defined]
            target=_work, args=(task, rank, name, send), name=name, daemon=True
        )
        process.start()
        send.close()
        return cls(name, process, receive)

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.answers.close()


def _collect(
    workers: list[_Worker], deadline_s: float, timeout_s: float, may_die: set[str]
) -> list[Any]:
    results: dict[str, Any] = {}
    waiting = {worker.answers: worker for worker in workers}
    while waiting:
        ready: list[Any] = connection.wait(
            list(waiting), timeout=max(0.0, deadline_s - time.monotonic())
        )
        if not ready:
            late = ", ".join(worker.name for worker in waiting.values())
            raise WorkerFailedError(late, f"still running after {timeout_s:g} s")
        for pipe in ready:
            worker = waiting.pop(pipe)
            try:
                answer = worker.answers.recv_bytes()
            except EOFError:
                worker.process.join(5)
                code = worker.process.exitcode
                if worker.name not in may_die:
                    raise WorkerFailedError(
                        worker.name, f"died with exit code {code}", code
                    ) from None
                results[worker.name] = None
                continue
            ok, value = _read(answer)
            if not ok:
                raise WorkerFailedError(worker.name, f"raised\n{value}")
            results[worker.name] = value
    for worker in workers:
        worker.process.join(max(0.0, deadline_s - time.monotonic()))
        if worker.process.exitcode is None:
            raise WorkerFailedError(worker.name, "gave its result and did not exit")
    return [results[worker.name] for worker in workers]


def _read(answer: bytes) -> tuple[bool, Any]:
    try:
        ok, value = pickle.loads(answer)
    except Exception:
        return False, f"a result that does not unpickle:\n{traceback.format_exc()}"
    return ok, value


def _work(task: _Task, rank: int, name: str, answers: connection.Connection) -> None:
    _end_with_parent()
    os.environ.update(task.env)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.port))
    try:
        from mmrpc import rpc

        init = {
            "rank": rank,
            "world_size": task.world_size,
            # They do not pickle, so that each worker makes its own.
            "rpc_backend_options": rpc.TensorPipeRpcBackendOptions(**task.options),
        }
        rpc.init_rpc(name, **{**init, **task.init})
        value = task.fn(rank, *task.args)
        if task.shutdown:
            rpc.shutdown()
        message = pickle.dumps((True, value))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    # Before the others can notice that this worker is lost, and fail for that reason.
    with contextlib.suppress(BrokenPipeError):
        answers.send_bytes(message)
    answers.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def __getattr__(name: str) -> Any:
    # It brings all of the paths room, which a test of calls does not need.
    if name == "MountConformance":
        from mmrpc.conformance import MountConformance

        return MountConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
