"""The agent of one node: does what the launcher says, and ends with it.

One thread waits for whatever comes first: a command, a signal, a worker's end, or the end of
the channel, which is the launcher's end.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from mmrpc.errors import LaunchError, MmrpcError
from mmrpc.launch import logs, messages, status
from mmrpc.launch.gang import Exit, Gang
from mmrpc.launch.guard import Guard
from mmrpc.launch.plan import CLUSTER_FILE, Run, WorkerPlan, attempt_env, plan_node

if TYPE_CHECKING:
    from mmrpc.config import ClusterConfig

LOST = 1
"""Exit code of an agent whose launcher went away while workers ran."""
_ORPHAN_GRACE_S = 4.0
"""Longest grace once the launcher is gone: then nothing may be left after 10 seconds."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAIL_LINES = 20
_BEAT_S = 15.0


class Agent:
    """Serves one channel until it ends.

    Args:
        read_fd: Where commands come from.
        write_fd: Where events go. May be the same, of a socket.
        own: The config that an agent started by hand was given, which is the only one that it
            follows; its working directory holds where the config names none.
    """

    def __init__(self, read_fd: int, write_fd: int, own: ClusterConfig | None = None) -> None:
        self._own = own
        self._read_fd, self._write_fd = read_fd, write_fd
        self._write_lock = threading.Lock()
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._node = ""
        self._run: Run
        self._plans: list[WorkerPlan] = []
        self._guard: Guard | None = None
        self._gang: Gang | None = None
        self._store: Any = None
        self._deadline: float | None = None
        self._shown: set[str] = set()
        self._lead = ""
        self._exit_code: int | None = None
        self._document: dict[str, Any] = {}

    def run(self) -> int:
        """Serves, and gives the process's exit code."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        _hear_signals()
        self._selector.register(self._read_fd, selectors.EVENT_READ, self._on_channel)
        self._selector.register(
            wake_read, selectors.EVENT_READ, lambda fd: self._on_signal(os.read(fd, 64)[0])
        )
        try:
            while self._exit_code is None or self._gang is not None:
                ready = self._selector.select(self._remaining_s())
                for key, _ in ready:
                    key.data(key.fd)
                self._end_gang_if_due()
                if not ready:
                    # A launcher whose host has lost power closes nothing: only what is sent and
                    # not acknowledged ends the connection.
                    self._send(messages.Beat())
        except Exception as error:
            self._fail(f"the agent failed: {type(error).__name__}: {error}")
            raise
        finally:
            signal.set_wakeup_fd(-1)
            if self._gang is not None:
                self._gang.close()
            if self._guard is not None:
                self._guard.close()
        return self._exit_code

    def _remaining_s(self) -> float:
        if self._deadline is None:
            return _BEAT_S
        return min(_BEAT_S, max(0.0, self._deadline - time.monotonic()))

    def _send(self, event: messages.Event) -> None:
        data = messages.encode(event)
        # A launcher that is gone is noticed where commands are read.
        with self._write_lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._write_fd, data) :]

    def _fail(self, reason: str, hint: str | None = None) -> None:
        self._send(messages.Failed(reason, hint))

    def _on_channel(self, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(fd)
            # To lose the launcher in the middle is no success.
            self._leave(0 if self._gang is None else LOST)
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            command = messages.decode(line + b"\n")
            if command is not None:
                self._obey(command)

    def _obey(self, command: messages.Command) -> None:
        if isinstance(command, messages.Refused):
            raise LaunchError(command.reason, node=self._node or None, exit_code=1)
        try:
            match command:
                case messages.Setup():
                    self._set_up(command)
                case messages.Listen():
                    self._listen()
                case messages.Start():
                    self._start(command)
                case messages.Stop():
                    self._stop(command.grace_s)
                case messages.Kill():
                    self._stop(0)
                case messages.Forget():
                    logs.remove(self._run.directory(self._node), self._node)
        except MmrpcError as error:
            self._fail(error.reason, error.hint)

    def _on_signal(self, number: int) -> None:
        self._leave(128 + number)

    def _leave(self, exit_code: int) -> None:
        if self._exit_code is None:
            self._exit_code = exit_code
            if self._gang is not None:
                self._stop(min(_ORPHAN_GRACE_S, self._run.cluster.launch.grace_s))

    def _set_up(self, setup: messages.Setup) -> None:
        from mmrpc.config import dump_config, parse_config
        from mmrpc.launch import preflight

        self._node = setup.node
        cluster = self._own or parse_config(setup.config)
        cwd = os.getcwd() if self._own else setup.cwd
        self._run = Run(cluster, setup.run_id, setup.run_name, tuple(setup.arguments), cwd)
        run, node = self._run, setup.node
        self._plans = plan_node(run, node, sys.executable)
        problems = preflight.enter(run.cwd_on(node), node)
        problems = problems or preflight.find_problems(run, node, self._plans)
        if setup.check_only:
            problems += preflight.find_mount_problems(run, node)
        directory = os.path.join(run.directory(node), node)
        if not problems and not setup.check_only:
            try:
                os.makedirs(directory)
                status.write_atomically(os.path.join(directory, CLUSTER_FILE), dump_config(cluster))
            except FileExistsError:
                reason = f"another run writes its logs to {directory!r}"
                hint = "Launch again: runs are told apart by the second of their start."
                problems.append(preflight.Problem(reason, hint))
            except OSError as error:
                reason = f"cannot write logs to {directory!r}: {(error.strerror or '').lower()}"
                problems.append(preflight.Problem(reason, f"Set nodes.{node}.log_dir."))
            self._guard = Guard(setup.run_id, node)
        told = [list(problem) for problem in problems]
        self._send(messages.Ready(socket.gethostname(), sys.executable, told))
        if not problems and not setup.check_only:
            # It takes a second, which all nodes spend at once this way, and not one by one.
            import torch.distributed.elastic.multiprocessing  # noqa: F401

    def _listen(self) -> None:
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed import DistNetworkError

        master = self._run.cluster.master
        self._store = None  # frees the port of the attempt before
        # At its own, the launcher waits for agents that are started by hand.
        port = 0 if self._run.cluster.launch.via == "manual" else master.port
        try:
            self._store = TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._run.cluster.launch.start_timeout_s),
            )
        except DistNetworkError as error:
            taken = "EADDRINUSE" in str(error)
            raise LaunchError(
                f"cannot listen on port {port}: "
                + ("it is in use" if taken else str(error).splitlines()[0]),
                hint="Choose another master.port, or 0 for any free one." if taken else None,
            ) from None
        self._send(messages.Listening(self._store.port))

    def _start(self, start: messages.Start) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        from mmrpc.rpc.handshake.table import LEAD

        self._lead = LEAD
        self._shown = {plan.worker.name for plan in self._plans if plan.shown}
        if self._exit_code is not None:
            return
        timeout_s = self._run.cluster.launch.start_timeout_s
        try:
            with socket.create_connection((start.master_addr, start.master_port), timeout_s):
                pass
        except OSError as error:
            raise LaunchError(
                f"cannot reach the master at {start.master_addr}:{start.master_port}: "
                f"{error.strerror or error}",
                hint=f"Check nodes.{self._run.cluster.master.node}.host and the firewall between "
                "the nodes.",
            ) from None
        if not self._plans:
            self._send(messages.Started({}))
            return
        env = attempt_env(start.attempt, start.master_addr, start.master_port)
        try:
            self._gang = Gang(self._plans, env, self._show, start.attempt)
        except SignalException as error:  # torch's handlers are in place while it starts them
            self._on_signal(error.sigval)
            return
        finally:
            _hear_signals()
        for fd in self._gang.fds:
            self._selector.register(fd, selectors.EVENT_READ, partial(self._on_exit, self._gang))
        now = time.time()
        self._document = {
            "attempt": start.attempt,
            "workers": {
                plan.worker.name: {
                    "rank": plan.worker.rank,
                    "pid": self._gang.pids[plan.worker.name],
                    "state": "running",
                    "started_s": now,
                    "ended_s": None,
                    "exit_code": None,
                    "logs": plan.directory,
                }
                for plan in self._plans
            },
        }
        self._publish("running")
        self._send(messages.Started(self._gang.pids))

    def _show(self, worker: str, stream: str, text: str) -> None:
        # What the handshake proved is shown even if the rank that tells it is not.
        if worker in self._shown or text.startswith(self._lead):
            self._send(messages.Line(worker, stream, text))

    def _on_exit(self, gang: Gang, fd: int) -> None:
        self._selector.unregister(fd)
        self._note(gang.reap(fd))

    def _note(self, end: Exit) -> None:
        directory = next(p.directory for p in self._plans if p.worker.name == end.worker)
        path = os.path.join(directory, "stderr.log")
        tail = logs.tail(path, _TAIL_LINES) if end.exit_code else []
        self._document["workers"][end.worker].update(
            state="stopped" if self._deadline is not None else _state(end.exit_code),
            ended_s=time.time(),
            exit_code=end.exit_code,
        )
        self._publish("running")
        self._send(messages.Exited(end.worker, end.exit_code, end.after_s, path, tail))

    def _stop(self, grace_s: float) -> None:
        if self._gang is None:
            self._send(messages.Stopped())
            return
        due = time.monotonic() + grace_s
        if self._deadline is None:
            self._gang.terminate()
        self._deadline = due if self._deadline is None else min(due, self._deadline)

    def _end_gang_if_due(self) -> None:
        gang = self._gang
        if gang is None or self._deadline is None:
            return
        if gang.fds and time.monotonic() < self._deadline:
            return
        survivors = gang.close()
        for fd in list(gang.fds):
            self._selector.unregister(fd)
        for end in gang.reap_all():
            self._note(end)
        self._gang = self._deadline = self._store = None
        codes = [worker["exit_code"] for worker in self._document["workers"].values()]
        self._publish("failed" if any(codes) or survivors else "done")
        self._send(messages.Stopped({str(pid): command for pid, command in survivors.items()}))

    def _publish(self, state: str) -> None:
        node = self._node
        document = {
            **self._document,
            "node": node,
            "state": state,
            "by": status.author(),
            "updated_s": time.time(),
        }
        # A full disk must not end the job; the launcher has the document as well.
        with contextlib.suppress(OSError):
            directory = os.path.join(self._run.directory(node), node)
            status.write_atomically(os.path.join(directory, status.STATUS_FILE), document)
        self._send(messages.Status(document))


def _state(exit_code: int) -> str:
    return "failed" if exit_code else "done"


def _hear_signals() -> None:
    for number in _SIGNALS:
        # The wake-up descriptor tells the loop; a handler must only be there.
        signal.signal(number, lambda *_: None)


def main() -> int:
    """Serves the launcher on standard input and output."""
    channel = os.dup(1)
    # What anything prints must not get between the events.
    os.dup2(2, 1)
    return Agent(0, channel).run()


if __name__ == "__main__":
    sys.exit(main())
