"""The errors of a launch, from what was seen to a sentence, and one screen of it. Pure."""

from __future__ import annotations

import itertools
import signal
from typing import TYPE_CHECKING

from mmrpc.errors import LaunchError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mmrpc.config import ClusterConfig
    from mmrpc.launch import messages
    from mmrpc.launch.channel import Ended

_SSH_FAILED = 255
_CANNOT_RUN = {126: "it is not executable", 127: "there is no such program"}


def code_of(exit_code: int) -> int:
    """What a shell makes of it: 128 + the signal, for one that was ended by a signal."""
    return 128 - exit_code if exit_code < 0 else exit_code


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def worker_failed(node: str, event: messages.Exited, *, is_shown: bool = False) -> LaunchError:
    """The first worker that failed.

    Args:
        node: Its node.
        event: Its end.
        is_shown: Whether its output was shown already: then its last words are enough.
    """
    error = LaunchError(
        f"worker {event.worker} failed: {_how(event.exit_code)} after {event.after_s:.1f} s",
        node=node,
        worker=event.worker,
        exit_code=code_of(event.exit_code),
        hint=_SIGNAL_HINTS.get(-event.exit_code),
    )
    if event.stderr_tail:
        told = _last_words(event.stderr_tail) if is_shown else event.stderr_tail
        error.add_note(f"the end of {event.stderr_path}:\n" + _quote(told))
    else:
        error.add_note(f"{event.stderr_path} is empty")
    return error


def is_consequence(event: messages.Exited) -> bool:
    """Whether a worker failed for want of another, which may take longer to end."""
    return any(line.startswith(_PEER_LOST) for line in event.stderr_tail)


_PEER_LOST = f"{PeerLostError.__module__}.{PeerLostError.__qualname__}:"

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "If nobody killed it, the kernel may have, for want of memory: see dmesg.",
    signal.SIGBUS: "A mapped file was truncated or could not be read, or /dev/shm is full.",
}


def _last_words(lines: list[str]) -> list[str]:
    """The exception that a traceback ends with, all lines of it; else the last line."""
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    after = lines[starts[-1] + 1 :] if starts else []
    words = list(itertools.dropwhile(lambda line: line.startswith(" "), after))
    return words or lines[-1:]


_TRACEBACK = "Traceback (most recent call last):"


def _quote(lines: list[str]) -> str:
    return "\n".join(f"  | {line}" for line in lines)


def interrupted(number: int) -> LaunchError:
    """The launcher got a signal."""
    name = signal.Signals(number).name
    return LaunchError(f"ended by {name}", exit_code=128 + number)


def absent(nodes: list[str], timeout_s: float) -> LaunchError:
    """Nodes that did not answer in time."""
    names = ", ".join(nodes)
    return LaunchError(
        f"no answer within {timeout_s:g} s from the agent{'s' * (len(nodes) > 1)} of {names}",
        node=nodes[0] if len(nodes) == 1 else None,
        exit_code=1,
        hint="See that the node is up, or raise launch.start_timeout_s.",
    )


def cannot_run(node: str, program: str, error: OSError, cluster: ClusterConfig) -> LaunchError:
    """What should start an agent could not be run on this machine."""
    local = cluster.launch.via == "local"
    return LaunchError(
        f"cannot run {program!r}: {(error.strerror or str(error)).lower()}",
        node=node,
        exit_code=127 if isinstance(error, FileNotFoundError) else 126,
        hint=f"Mend nodes.{node}.python."
        if local
        else f"launch.via: {cluster.launch.via} needs it.",
    )


def raise_problems(problems: Mapping[str, list[list[str]]]) -> None:
    """Raises one error for all that the agents found.

    Raises:
        LaunchError: About the first; the others are its notes.
    """
    errors = [
        LaunchError(reason, node=node, hint=hint, exit_code=1)
        for node, found in problems.items()
        for reason, hint in found
    ]
    if not errors:
        return
    for other in errors[1:]:
        errors[0].add_note(str(other))
    raise errors[0]


def agent_ended(node: str, event: Ended, cluster: ClusterConfig, was_ready: bool) -> LaunchError:
    """An agent, or the way to it, ended before it was told to."""
    code, via = event.exit_code, cluster.launch.via
    python = cluster.nodes[node].python
    hint: str | None = None
    if code is None:
        reason = "the connection to the agent was lost"
    elif via == "ssh" and code == _SSH_FAILED:
        lost = "was lost, or the agent was killed"
        reason = f"the ssh connection {lost if was_ready else 'failed'}"
        hint = None if was_ready else "Try the same by hand: ssh must not ask for anything."
    elif not was_ready and code in _CANNOT_RUN:
        reason = f"cannot run {python or 'python'!r}: {_CANNOT_RUN[code]}"
        hint = f"Set nodes.{node}.python to an interpreter of that node."
    elif not was_ready and any("No module named" in line for line in event.stderr_tail):
        reason = f"{python or 'python'} cannot start the agent: {event.stderr_tail[-1]}"
        hint = f"Install mmrpc there, or mend nodes.{node}.python."
    else:
        who = "the agent" if via == "local" else f"the agent or its {_PROGRAM[via]}"
        reason = f"{who} ended: {_how(code)}"
    error = LaunchError(reason, node=node, hint=hint, exit_code=code_of(code or 0) or 1)
    if event.stderr_tail:
        error.add_note("the last that was heard:\n" + _quote(event.stderr_tail))
    return error


_PROGRAM = {"ssh": "ssh", "slurm": "srun", "manual": "connection"}


def survivors(node: str, commands: Mapping[str, str]) -> str:
    """Processes that even SIGKILL did not end."""
    lines = [f"on {node}: still there after SIGKILL, in an uninterruptible wait of the kernel:"]
    lines += [f"  {pid} {command}" for pid, command in commands.items()]
    return "\n".join(lines)


def screen(error: LaunchError) -> str:
    """The error and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])
