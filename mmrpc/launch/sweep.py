"""Finds and kills what belongs to a run on this node, also what left its process group.

Each process of a run inherits ``MMRPC_RUN_ID`` and ``MMRPC_NODE``, and the kernel shows them
in ``/proc/<pid>/environ`` whatever became of its parents. PIDs and groups do not do: a wrapper
script's children outlive it, and a number is used again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN_ID, NODE = "MMRPC_RUN_ID", "MMRPC_NODE"
_ROUNDS = 20


def mark(run_id: str, node: str) -> dict[str, str]:
    """The environment variables that mark a process as one of this run on this node."""
    return {RUN_ID: run_id, NODE: node}


def kill(run_id: str, node: str, timeout_s: float = 2.0) -> dict[int, str]:
    """Kills every process of a run on this node, and gives those that are left.

    Args:
        run_id: The run.
        node: The node: several may share one machine.
        timeout_s: How long to wait for the killed to be gone. One in an uninterruptible wait
            of the kernel, such as on a dead file system, may never be.

    Returns:
        Command line by PID of what still runs.
    """
    deadline = time.monotonic() + timeout_s
    fds: dict[int, int] = {}
    try:
        # Once more after each that was found: it may have forked before it was killed.
        for _ in range(_ROUNDS):
            found = {pid: fd for pid, fd in _open(run_id, node) if _keep(fds, pid, fd)}
            if not found:
                break
            for fd in found.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
        return {pid: _command(pid) for pid, fd in fds.items() if not _ends(fd, deadline)}
    finally:
        for fd in fds.values():
            os.close(fd)


def _keep(fds: dict[int, int], pid: int, fd: int) -> bool:
    if pid in fds:
        os.close(fd)
        return False
    fds[pid] = fd
    return True


def _open(run_id: str, node: str) -> Iterator[tuple[int, int]]:
    """PID and descriptor of each process that bears the marks and is no zombie."""
    marks = {f"{name}={value}".encode() for name, value in mark(run_id, node).items()}
    for name in os.listdir("/proc"):
        if not name.isdigit() or (pid := int(name)) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            # Held before it is looked at, so that it is not another one that gets killed.
            fd = os.pidfd_open(pid)
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    is_ours = marks <= set(file.read().split(b"\0"))
            except OSError:
                is_ours = False
            if is_ours and not _ends(fd, 0):
                yield pid, fd
            else:
                os.close(fd)


def _ends(pidfd: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"
