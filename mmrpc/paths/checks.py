"""Probes of the mounts of a node that come back in time, whatever the file systems do.

They run in a helper process, one thread each: a thread or process that waits for a dead server
cannot be ended, and this way it is not ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import IO, TYPE_CHECKING, cast

from mmrpc.paths.report import ProbeReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mmrpc.paths.mounts import Mount

_START_S = 30.0
_READ_BYTES = 1 << 16


def probe_mounts(
    mounts: Iterable[Mount], *, timeout_s: float, node: str | None = None
) -> list[ProbeReport]:
    """Probes mounts on this node, all at once.

    Args:
        mounts: What to probe. A mount with ``access="write"`` is also written to: a file without
            a name where the file system can do that, else one that is removed at once.
        timeout_s: Seconds that each may take. Starting the helper is not counted.
        node: Name of this node, for the reports.

    Returns:
        A report for each, in order. One that did not answer has the error `MountTimeoutError`.
    """
    wanted = list(mounts)
    if not wanted:
        return []
    with _helper(wanted, node) as helper:
        reports = _collect(helper, len(wanted), timeout_s)
        exit_code = helper.poll()
    return [
        reports.get(index) or _no_answer(mount, node, timeout_s, exit_code)
        for index, mount in enumerate(wanted)
    ]


@contextlib.contextmanager
def _helper(mounts: list[Mount], node: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a helper on its task; it ends with the block, or with us if we are killed."""
    # A new interpreter, not a fork: fsspec and torch hold locks that a forked child never gets.
    helper = subprocess.Popen(
        [sys.executable, "-m", "mmrpc.paths.probing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)},
        cwd="/",
    )
    try:
        task = {"node": node, "mounts": [asdict(mount) for mount in mounts]}
        with contextlib.suppress(BrokenPipeError):
            _pipe(helper.stdin).write(json.dumps(task).encode() + b"\n")
            _pipe(helper.stdin).flush()
        yield helper
    finally:
        helper.kill()
        with contextlib.suppress(BrokenPipeError):  # it ended before it had read its task
            _pipe(helper.stdin).close()
        _pipe(helper.stdout).close()
        try:
            helper.wait(1.0)
        except subprocess.TimeoutExpired:
            # It waits in the kernel for a dead server. Whenever that ends, it is collected.
            threading.Thread(target=helper.wait, name="mmrpc-reaper", daemon=True).start()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    return cast("IO[bytes]", pipe)


def _collect(
    helper: subprocess.Popen[bytes], count: int, timeout_s: float
) -> dict[int, ProbeReport]:
    """Reads reports until all are here, the helper ends, or time is up since it began."""
    pipe = _pipe(helper.stdout)
    reports: dict[int, ProbeReport] = {}
    deadline, rest = time.monotonic() + _START_S, b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(reports) < count:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                break
            data = os.read(pipe.fileno(), _READ_BYTES)
            if not data:
                helper.wait(1.0)
                break
            *lines, rest = (rest + data).split(b"\n")
            for answer in map(json.loads, lines):
                if answer == "ready":
                    deadline = time.monotonic() + timeout_s
                else:
                    reports[answer["index"]] = ProbeReport.from_dict(answer["report"])
    return reports


def _no_answer(
    mount: Mount, node: str | None, timeout_s: float, exit_code: int | None
) -> ProbeReport:
    report = ProbeReport(mount.name, node, mount.root, mount.access, readable=None)
    if exit_code is not None:
        return replace(
            report,
            error="PathError",
            reason=f"the probe ended with exit code {exit_code}",
            hint="Run `python -m mmrpc.paths.probing` on the node to see why.",
        )
    return replace(
        report,
        elapsed_s=timeout_s,
        error="MountTimeoutError",
        reason=f"no answer within {timeout_s:g} s",
        hint="Is its server up? The limit is rpc.mount_timeout_s.",
    )
