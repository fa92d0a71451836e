"""Where logs go, their last lines, and how a tailed line finds its way to the console."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.multiprocessing.api import LogsSpecs

_TAIL_BYTES = 65536
_HEADER = "\t"
_AGENT_WARNING = re.compile(r"\[W\d+ \S+ tensorpipe_agent\.cpp:\d+\]")


def run_name(name: str, now_s: float | None = None) -> str:
    """``<name>-<utc>``: sorts by time, and is a safe file name."""
    utc = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('.-') or 'run'}-{utc}"


def remove(run_dir: str, node: str | None = None) -> None:
    """Removes a run's directory, or a node's part of it and the rest if that is empty.

    Args:
        run_dir: Directory of the run.
        node: The node; None for all that is there.
    """
    shutil.rmtree(os.path.join(run_dir, node) if node else run_dir, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is gone already, or others have their part in it
        os.rmdir(run_dir)


def tail(path: str, lines: int = 20) -> list[str]:
    """The last lines of a log that tell something; none if it cannot be read.

    What torch's RPC agent says of each peer that is gone comes after what the worker itself says,
    a line for each call: it is left out, unless there is nothing else.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    all_lines = text.splitlines()
    telling = [line for line in all_lines if not _AGENT_WARNING.match(line)]
    return (telling or all_lines)[-lines:]


def specs(directories: list[str], tee: list[bool], *, keep: bool) -> LogsSpecs:
    """Tells torch's process context where each local rank's output goes.

    Args:
        directories: A directory per local rank; made if missing.
        tee: Whether a local rank's lines are shown as well.
        keep: Whether to append to the logs that are there: the gang was restarted.
    """
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class Specs(LogsSpecs):
        """Files by worker instead of by rank and attempt."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files: dict[str, dict[int, str]] = {"stdout": {}, "stderr": {}}
            for local_rank, directory in enumerate(directories):
                os.makedirs(directory, exist_ok=True)
                for stream, paths in files.items():
                    paths[local_rank] = os.path.join(directory, f"{stream}.log")
                    if keep:
                        _set_aside(paths[local_rank])
            shown = [
                {rank: path for rank, path in paths.items() if tee[rank]}
                for paths in files.values()
            ]
            return LogsDest(
                stdouts=files["stdout"],
                stderrs=files["stderr"],
                tee_stdouts=shown[0],
                tee_stderrs=shown[1],
                error_files=dict.fromkeys(envs, os.devnull),
            )

        @property
        def root_log_dir(self) -> str:
            return os.path.dirname(directories[0])

    return Specs()


def _set_aside(path: str) -> None:
    """Moves the log of the attempt before to the first free of ``stdout.0.log`` and so on."""
    stem, suffix = os.path.splitext(path)
    number = 0
    while os.path.exists(aside := f"{stem}.{number}{suffix}"):
        number += 1
    if os.path.exists(path):
        os.rename(path, aside)


def header(worker: str) -> str:
    """What `Sink` recognises a worker's lines by."""
    return worker + _HEADER


class Sink:
    """A text stream that cuts what torch's log tailers write into lines of one worker.

    They write what a file has, also half a line, each time after the header.

    Args:
        stream: ``stdout`` or ``stderr``.
        emit: Called with worker, stream and line.
    """

    def __init__(self, stream: str, emit: Callable[[str, str, str], None]) -> None:
        self._stream, self._emit = stream, emit
        self._halves: dict[str, str] = {}
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Takes one header and what follows it."""
        worker, _, line = text.partition(_HEADER)
        with self._lock:
            line = self._halves.pop(worker, "") + line
            if not line.endswith("\n"):
                self._halves[worker] = line
                return len(text)
        self._emit(worker, self._stream, line.rstrip("\r\n"))
        return len(text)

    def flush(self) -> None:
        """Gives out half lines: nothing follows."""
        with self._lock:
            halves, self._halves = self._halves, {}
        for worker, line in halves.items():
            self._emit(worker, self._stream, line)
