"""The workers of one node: started together, watched by descriptor, ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mmrpc.launch import logs, sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    from mmrpc.launch.plan import WorkerPlan


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended.

    Attributes:
        worker: Its name.
        exit_code: What it returned, or minus the signal that ended it.
        after_s: Seconds since the gang was started.
    """

    worker: str
    exit_code: int
    after_s: float


class Gang:
    """The running workers of a node; at most one gang at a time, on the main thread.

    They are fresh processes in sessions of their own, under torch's process context. Which of
    them has ended is told by the descriptors in `fds`, so that nobody has to poll.

    Args:
        plans: The workers, by local rank.
        env: What is added to each worker's environment.
        emit: Takes worker, stream and line of what is to be shown.
        attempt: How often the gang was started before.
    """

    def __init__(
        self,
        plans: list[WorkerPlan],
        env: dict[str, str],
        emit: Callable[[str, str, str], None],
        attempt: int,
    ) -> None:
        from torch.distributed.elastic.multiprocessing import start_processes

        self._plans = plans
        self._sinks = {name: logs.Sink(name, emit) for name in ("stdout", "stderr")}
        shim = ("-m", "mmrpc.launch.worker", "--exec", str(os.getpid()))
        # torch's tailers write to what these names mean when the context is made.
        with (
            contextlib.redirect_stdout(self._sinks["stdout"]),
            contextlib.redirect_stderr(self._sinks["stderr"]),
        ):
            context = start_processes(
                name="worker",
                entrypoint=sys.executable,
                args={i: (*shim, *plan.argv) for i, plan in enumerate(plans)},
                envs={i: {**plan.env, **env} for i, plan in enumerate(plans)},
                logs_specs=logs.specs(
                    [plan.directory for plan in plans],
                    [plan.shown or plan.worker.rank == 0 for plan in plans],
                    keep=attempt > 0,
                ),
                log_line_prefixes={
                    i: logs.header(plan.worker.name) for i, plan in enumerate(plans)
                },
            )
        # One for an executable, that is.
        self._context = cast("SubprocessContext", context)
        self._started = time.monotonic()
        self.pids = {plans[i].worker.name: pid for i, pid in context.pids().items()}
        self.fds = {os.pidfd_open(pid): plans[i].worker.name for i, pid in context.pids().items()}
        """Descriptor that is readable once the worker has ended, and the worker."""

    def reap(self, fd: int) -> Exit:
        """Takes the exit code of the worker of a readable descriptor, and closes that."""
        worker = self.fds.pop(fd)
        os.close(fd)
        rank = next(i for i, plan in enumerate(self._plans) if plan.worker.name == worker)
        code = self._context.subprocess_handlers[rank].proc.wait()
        return Exit(worker, code, time.monotonic() - self._started)

    def terminate(self) -> None:
        """Asks all workers that still run, and what they started, to end."""
        running = set(self.fds.values())
        for rank, handler in self._context.subprocess_handlers.items():
            if self._plans[rank].worker.name in running:
                with contextlib.suppress(ProcessLookupError):
                    handler.close(death_sig=signal.SIGTERM)

    def close(self) -> dict[int, str]:
        """Kills what is left of the run on this node and gives what survives that."""
        env = self._plans[0].env
        survivors = sweep.kill(env[sweep.RUN_ID], env[sweep.NODE])
        # All that can be dead is; the rest is not worth another wait.
        self._context.close(signal.SIGKILL, timeout=0)
        for sink in self._sinks.values():
            sink.flush()
        return survivors

    def reap_all(self) -> Iterable[Exit]:
        """Takes the exit codes of all that have ended by now."""
        from select import POLLIN, poll

        ready = poll()
        for fd in self.fds:
            ready.register(fd, POLLIN)
        for fd, _ in ready.poll(0):
            yield self.reap(fd)
