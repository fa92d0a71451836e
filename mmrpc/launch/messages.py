"""What launcher and agent tell each other: frozen values, one JSON line each. Pure.

A line starts with the record separator (RFC 7464), so that what a login shell prints on the
same stream is told from it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

_START = b"\x1e"


@dataclass(frozen=True, slots=True)
class Setup:
    """To the agent, first: who it is and what the job is. Answered by `Ready`.

    Attributes:
        config: The resolved config, as JSON values.
        node: Name of the agent's node.
        run_id: What no other run is called.
        run_name: Name of the run's directory in the config's log directory.
        arguments: What stood after ``--``: appended to each worker's command line.
        cwd: Working directory of the launcher, for nodes that have none of their own.
        check_only: Whether nothing will be started, so that nothing may be written.
    """

    config: dict[str, Any]
    node: str
    run_id: str
    run_name: str
    arguments: list[str]
    cwd: str
    check_only: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """To an agent that was started by hand: it may not take part."""

    reason: str


@dataclass(frozen=True, slots=True)
class Listen:
    """To the agent of the master's node: open the store. Answered by `Listening`."""


@dataclass(frozen=True, slots=True)
class Start:
    """To every agent: start the workers. Answered by `Started`, then `Exited` for each."""

    attempt: int
    master_addr: str
    master_port: int


@dataclass(frozen=True, slots=True)
class Stop:
    """To every agent: SIGTERM, after `grace_s` seconds SIGKILL. Answered by `Stopped`."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Kill:
    """To every agent: SIGKILL now."""


@dataclass(frozen=True, slots=True)
class Forget:
    """To every agent whose workers have ended: remove what the run wrote on the node."""


@dataclass(frozen=True, slots=True)
class Hello:
    """From an agent that was started by hand, first: who it is."""

    node: str
    config_hash: str


@dataclass(frozen=True, slots=True)
class Ready:
    """From the agent: what it is, and each problem that it found: reason and hint."""

    hostname: str
    python: str
    problems: list[list[str]]


@dataclass(frozen=True, slots=True)
class Listening:
    """From the master's agent: the store's port."""

    port: int


@dataclass(frozen=True, slots=True)
class Started:
    """From the agent: PID by worker."""

    pids: dict[str, int]


@dataclass(frozen=True, slots=True)
class Exited:
    """From the agent: a worker ended.

    Attributes:
        worker: Its name.
        exit_code: What it returned, or minus the signal that ended it.
        after_s: Seconds since it was started.
        stderr_path: Its log, on its node.
        stderr_tail: The last lines of it.
    """

    worker: str
    exit_code: int
    after_s: float
    stderr_path: str
    stderr_tail: list[str]


@dataclass(frozen=True, slots=True)
class Line:
    """From the agent: a worker printed a line, without its newline."""

    worker: str
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """From the agent: no worker runs, but for `survivors`: command by PID as text."""

    survivors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """From the agent: it cannot do what it was told."""

    reason: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """From the agent, now and then: bytes that show the kernel whether the launcher is there."""


@dataclass(frozen=True, slots=True)
class Status:
    """From the agent: the document that it wrote for ``mmrpc status``."""

    document: dict[str, Any]


Command = Setup | Refused | Listen | Start | Stop | Kill | Forget
Event = Hello | Ready | Listening | Started | Exited | Line | Stopped | Failed | Beat | Status
_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        *(Setup, Refused, Listen, Start, Stop, Kill, Forget),
        *(Hello, Ready, Listening, Started, Exited, Line, Stopped, Failed, Beat, Status),
    )
}


def encode(message: Command | Event) -> bytes:
    """One line."""
    body = {"is": type(message).__name__, **dataclasses.asdict(message)}
    return _START + json.dumps(body, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Any:
    """The message of a line, or None if it is somebody else's print."""
    if not line.startswith(_START):
        return None
    try:
        body = json.loads(line[1:])
        return _TYPES[body.pop("is")](**body)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
