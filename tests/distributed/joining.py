"""Processes that join a group without a cluster's config, and tell how it went."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed.rpc

from mmrpc import rpc
from mmrpc.testing import free_port
from tests.distributed.workers import Raised, outcome

DEADLINE_S = 90.0
IN = "in, and out again"


class Joiner:
    """A process that calls `init_rpc`, makes a call to itself, and shuts down.

    Args:
        rank: Its number.
        world_size: What it passes.
        name: What it passes; ``w<rank>`` if not given.
        env: Its environment variables, beside the port.
        first: Runs there before.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        name: str | None = None,
        *,
        env: dict[str, str] | None = None,
        first: Callable[[], None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        multiprocessing.set_forkserver_preload(["mmrpc.rpc"])
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_join,
            args=(theirs, rank, world_size, name or f"w{rank}", env or {}, first, options or {}),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"
        self.started_s = time.monotonic()

    def found(self) -> Any:
        """What `init_rpc` and the rest raised, or `IN`; None if the process died."""
        if not wait([self._pipe], DEADLINE_S):
            raise AssertionError("it hangs")
        try:
            return self._pipe.recv()
        except EOFError:
            return None

    def interrupt(self) -> None:
        """As Ctrl-C would."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)

    def close(self) -> None:
        """Ends it, whatever it does."""
        if self._pipe.poll():
            self.process.join(5)
        self.process.kill()
        self.process.join()
        self.process.close()
        self._pipe.close()


def join(
    *joiners: Callable[[dict[str, str]], Joiner], timeout_s: float = 60, **env: str
) -> list[Any]:
    """Lets processes join one group, and gives what each of them found."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "MMRPC_INIT_TIMEOUT_S": str(timeout_s),
        **env,
    }
    started: list[Joiner] = []
    try:
        started += [make(shared) for make in joiners]
        return [joiner.found() for joiner in started]
    finally:
        for joiner in started:
            joiner.close()


def as_rank(rank: int, world_size: int, name: str | None = None, **how: Any) -> Any:
    """Makes a `Joiner` with the environment that all have."""
    return lambda env: Joiner(rank, world_size, name, env=env, **how)


def reasons(found: Sequence[Any]) -> set[str]:
    """The texts of the errors that all ranks had."""
    assert all(isinstance(one, Raised) for one in found), found
    return {one.message for one in found}


def _join(
    pipe: Connection,
    rank: int,
    world_size: int,
    name: str,
    env: dict[str, str],
    first: Callable[[], None] | None,
    options: dict[str, Any],
) -> None:
    os.environ.update(env)
    if first is not None:
        first()
    pipe.send("ready")
    try:
        pipe.send(outcome(lambda: _be_there(name, rank, world_size, options)))
    except KeyboardInterrupt as error:
        pipe.send(Raised(error))


def _be_there(name: str, rank: int, world_size: int, options: dict[str, Any]) -> str:
    given = rpc.TensorPipeRpcBackendOptions(**options) if options else None
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=given)
    for other in range(world_size):
        rpc.rpc_sync(other, len, ([],))
    rpc.shutdown()
    return IN


def die_after_meeting() -> None:
    """Lets this process be killed when the ranks have met and RPC has not begun."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    torch.distributed.rpc.init_rpc = die


def stop_after_meeting() -> None:
    """Lets this process stand still when the ranks have met and RPC has not begun."""

    def stand_still(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    torch.distributed.rpc.init_rpc = stand_still


class FewDescriptors:
    """Leaves a process, when it is called there, so many descriptors and no more.

    Args:
        spare: How many.
    """

    def __init__(self, spare: int) -> None:
        self.spare = spare

    def __call__(self) -> None:
        """Takes the others away."""
        most = max(map(int, os.listdir("/proc/self/fd"))) + self.spare
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
