"""The launcher: starts an agent per node, then the gang, and sees it to its end.

All that happens comes through one queue: what agents say, the end of a channel, a signal. The
first thing that goes wrong decides the outcome; what follows from it is only cleaned up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import queue
import signal
import time
import uuid
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from mmrpc.config import config_hash, dump_config
from mmrpc.errors import LaunchError
from mmrpc.launch import causes, join, logs, messages, plan, reach, slurm, status
from mmrpc.launch.channel import Channel, Ended, Noise, ProcessChannel, SocketChannel
from mmrpc.launch.console import Console
from mmrpc.launch.plan import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mmrpc.config import ClusterConfig

_CLOSE_S = 8.0
"""How long an agent may take to end after its gang has: its guard looks around once more."""
_LAST_BREATH_S = 3.0
"""How long a worker that others have lost may take to end itself."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupted(Exception):  # noqa: N818
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Launcher:
    """One launch of one cluster; use once, on the main thread.

    Args:
        cluster: The resolved config.
        arguments: Appended to each worker's command line.
        check_only: Whether to stop before any worker is started, and to write nothing.
        is_transient: Whether a run that ends well leaves nothing behind, on no node.
        console: What shows the workers' lines; standard output and error by default.

    Attributes:
        run: What is run.
        slurm_nodes: Slurm's name of each node, for ``via: slurm``.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        arguments: tuple[str, ...] = (),
        *,
        check_only: bool = False,
        is_transient: bool = False,
        console: Console | None = None,
    ) -> None:
        self.slurm_nodes: dict[str, str] = {}
        if cluster.launch.via == "slurm":
            cluster, self.slurm_nodes = slurm.place(cluster)
        self._check_only, self._is_transient = check_only, is_transient
        self.run = Run(
            cluster, uuid.uuid4().hex, logs.run_name(cluster.name), arguments, cwd=os.getcwd()
        )
        self._workers = {worker.name: worker for worker in cluster.workers()}
        self._console = console or Console([*self._workers, *self.run.nodes()])
        self._events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._listener: join.Listener | None = None
        self._channels: dict[str, Channel] = {}
        self._ended: set[str] = set()
        self._stopped: set[str] = set()
        self._ready: dict[str, messages.Ready] = {}
        self._exits: dict[str, int] = {}
        self._has_cause = False
        self._port = 0
        self._started: set[str] = set()
        self._document: dict[str, Any] = {}
        self._is_stale = False

    @property
    def reached(self) -> dict[str, messages.Ready]:
        """Nodes whose agents have reported, and what they are."""
        return {node: self._ready[node] for node in self.run.nodes() if node in self._ready}

    def launch(self) -> None:
        """Runs the job to its end.

        Raises:
            LaunchError: If it failed, or was interrupted; `exit_code` is the launcher's.
        """
        if not self._workers:
            raise LaunchError("no role has a worker", hint="Give the config some roles.")
        with _signals_to(self._events):
            outcome: LaunchError | None = LaunchError("the launcher failed", exit_code=1)
            try:
                if not self._check_only:
                    self._open_directory()
                self._start_agents()
                if not self._check_only:
                    self._run_attempts()
                outcome = None
            except _Interrupted as interrupt:
                outcome = causes.interrupted(interrupt.number)
            except BrokenPipeError:
                outcome = causes.interrupted(signal.SIGPIPE)
            except LaunchError as error:
                outcome = error
            finally:
                self._finish(outcome)
            if outcome is not None:
                raise outcome

    def _open_directory(self) -> None:
        try:
            directory = self._make_directory()
            config = dump_config(self.run.cluster)
            status.write_atomically(os.path.join(directory, plan.CLUSTER_FILE), config)
        except OSError as error:
            raise LaunchError(
                f"cannot write logs to {self.run.directory()!r}: "
                f"{(error.strerror or str(error)).lower()}",
                hint="Set logs.dir.",
                exit_code=1,
            ) from None
        self._document = {
            "name": self.run.cluster.name,
            "run_id": self.run.run_id,
            "state": "starting",
            "exit_code": None,
            "cause": None,
            "by": status.author(),
            "started_s": time.time(),
            "nodes": {},
        }
        self._publish("starting")
        self._console.say(f"logs in {directory}")
        self._console.say(plan.table(list(self._workers.values()), self.run.cluster))

    def _make_directory(self) -> str:
        os.makedirs(os.path.dirname(self.run.directory()), exist_ok=True)
        name = self.run.name
        for number in itertools.count(2):
            directory = self.run.directory()
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
                break
            self.run = dataclasses.replace(self.run, name=f"{name}-{number}")
        return directory

    def _start_agents(self) -> None:
        cluster = self.run.cluster
        awaited = self._await_agents() if cluster.launch.via == "manual" else set()
        for node in self.run.nodes():
            if node in awaited:
                continue
            command = reach.command(cluster, node, self.slurm_nodes)
            try:
                channel = ProcessChannel(node, self._events, command)
            except OSError as error:
                raise causes.cannot_run(node, command[0], error, cluster) from None
            self._set_up(node, channel)
        timeout_s = cluster.launch.start_timeout_s
        nodes = set(self.run.nodes()) - (awaited if self._check_only else set())
        if not self._pump(lambda: self._ready.keys() >= nodes, timeout_s):
            raise causes.absent(sorted(nodes - self._ready.keys()), timeout_s)
        causes.raise_problems({node: ready.problems for node, ready in self._ready.items()})

    def _set_up(self, node: str, channel: Channel) -> None:
        run = self.run
        self._channels[node] = channel
        config, arguments = dump_config(run.cluster), list(run.arguments)
        channel.send(
            messages.Setup(config, node, run.run_id, run.name, arguments, run.cwd, self._check_only)
        )

    def _await_agents(self) -> set[str]:
        """Lets agents that are started by hand come in; gives the nodes that they are of."""
        cluster = self.run.cluster
        others = set(self.run.nodes()) - {cluster.master.node}
        if not others or self._check_only:
            return others
        join.require_port(cluster)
        self._listener = join.Listener(
            cluster.master.port, others, config_hash(cluster), self._events
        )
        for node in sorted(others):
            self._console.say(f"on {node}, run: {reach.by_hand(cluster, node)}")
        return others

    def _run_attempts(self) -> None:
        restarts = self.run.cluster.launch.max_restarts
        for attempt in range(restarts + 1):
            try:
                self._run_gang(attempt)
                return
            except LaunchError as error:
                # Without its agent a node cannot take part in another attempt.
                if error.worker is None or attempt == restarts:
                    raise
                self._console.say(causes.screen(error))
                if (interrupt := self._stop_gang()) is not None:
                    raise interrupt from None
                if self._ended:
                    raise
                self._console.say(f"restarting all workers: {attempt + 1} of {restarts}")

    def _run_gang(self, attempt: int) -> None:
        cluster = self.run.cluster
        self._exits, self._port, self._has_cause = {}, 0, False
        self._started, self._stopped = set(), set()
        master, timeout_s = cluster.master.node, cluster.launch.start_timeout_s
        self._channels[master].send(messages.Listen())
        if not self._pump(lambda: self._port > 0, timeout_s):
            raise causes.absent([master], timeout_s)
        start = messages.Start(attempt, cluster.nodes[master].host, self._port)
        self._tell_all(start)
        if not self._pump(lambda: self._started >= self._channels.keys(), timeout_s):
            raise causes.absent(sorted(self._channels.keys() - self._started), timeout_s)
        self._publish("running")
        self._pump(lambda: self._exits.keys() >= self._workers.keys(), None)

    def _pump(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Takes events until something holds; gives False if the time is over before."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_done():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                node, event = self._events.get(timeout=left_s)
                self._take(node, event)
            if self._is_stale and self._events.empty():
                self._publish(self._document["state"])
        return True

    def _take(self, node: str, event: Any) -> None:
        match event:
            case int():
                raise _Interrupted(event)
            case messages.Line():
                self._console.line(event.worker, event.text, event.stream)
            case Noise():
                self._console.line(node, event.text, "stderr")
            case messages.Status():
                self._document["nodes"][node] = event.document
                self._is_stale = True  # written once for all that come together
            case join.Joined():
                channel = SocketChannel(node, self._events, event.connection, event.from_agent)
                self._set_up(node, channel)
            case messages.Ready():
                self._ready[node] = event
            case messages.Listening():
                self._port = event.port
            case messages.Started():
                self._started.add(node)
            case messages.Stopped():
                self._stopped.add(node)
                if event.survivors:
                    self._console.say(causes.survivors(node, event.survivors))
            case messages.Exited():
                self._exits[event.worker] = event.exit_code
                if event.exit_code and not (self._has_cause and causes.is_consequence(event)):
                    raise self._cause(node, event)
            case messages.Failed():
                raise LaunchError(event.reason, node=node, hint=event.hint, exit_code=1)
            case Ended():
                self._ended.add(node)
                raise causes.agent_ended(node, event, self.run.cluster, node in self._ready)

    def _cause(self, node: str, event: messages.Exited) -> LaunchError:
        """Gives the failure that came first, which need not be the one that was seen first.

        A worker that raises closes its connections before it has ended; who notices can be faster.
        """
        self._has_cause = True
        is_shown = plan.is_shown(event.worker, self.run.cluster)
        error = causes.worker_failed(node, event, is_shown=is_shown)
        if causes.is_consequence(event):
            try:
                self._pump(lambda: self._exits.keys() >= self._workers.keys(), _LAST_BREATH_S)
            except LaunchError as first:
                return first
        return error

    def _stop_gang(self) -> _Interrupted | BrokenPipeError | None:
        """Has every agent end its workers; gives what interrupted that, if anything did.

        Whatever else goes wrong now follows from what went before.
        """
        interrupt: _Interrupted | BrokenPipeError | None = None
        self._has_cause = True
        grace_s = self.run.cluster.launch.grace_s
        self._tell_all(messages.Stop(grace_s))
        deadline = time.monotonic() + grace_s + _CLOSE_S
        while True:
            try:
                # An agent that has not even reported has no workers, and may hang anywhere.
                self._pump(
                    lambda: (self._stopped | self._ended) >= self._ready.keys(),
                    max(0.0, deadline - time.monotonic()),
                )
                return interrupt
            except (_Interrupted, BrokenPipeError) as error:
                interrupt = error
                self._tell_all(messages.Kill())
            except LaunchError:
                continue

    def _tell_all(self, command: messages.Command) -> None:
        for channel in self._channels.values():
            channel.send(command)

    def _finish(self, error: LaunchError | None) -> None:
        """Ends all agents, and says how it went in the status."""
        if self._listener is not None:
            self._listener.close()
        self._stop_gang()
        forget = self._is_transient and error is None
        if forget:
            self._tell_all(messages.Forget())
        for channel in self._channels.values():
            channel.hang_up()
        for node, channel in self._channels.items():
            if not channel.close(_CLOSE_S if node in self._ready else 1.0) and node in self._ready:
                self._console.say(f"the agent on {node} did not end and was killed")
        while True:
            try:
                self._pump(self._events.empty, 0.1)
                break
            except (LaunchError, _Interrupted, BrokenPipeError):
                continue
        if forget:
            logs.remove(self.run.directory())
        elif self._document:
            self._document["exit_code"] = error.exit_code if error else 0
            self._document["cause"] = str(error) if error else None
            self._publish("failed" if error else "done")

    def _publish(self, state: str) -> None:
        self._document["state"] = state
        self._document["updated_s"] = time.time()
        self._is_stale = False
        # A full disk must not end the job.
        with contextlib.suppress(OSError):
            status.write_atomically(
                os.path.join(self.run.directory(), status.STATUS_FILE), self._document
            )


@contextlib.contextmanager
def _signals_to(events: SimpleQueue[tuple[str, Any]]) -> Iterator[None]:
    # SimpleQueue.put may be called in a handler, whatever it interrupts.
    before = {
        number: signal.signal(number, lambda got, _: events.put(("", got))) for number in _SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
