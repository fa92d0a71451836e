"""Launches for tests: a job in a directory of its own, and who is alive of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PYTHON = sys.executable
PATIENCE_S = 90.0
"""For anything that must happen; the machine may be busy."""

JOB = '''
import os, signal, subprocess, sys, time

def me():
    return os.environ["MMRPC_WORKER"]

def hello():
    print("hello from", me(), "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"],
          "arguments", sys.argv[1:])

def environment():
    names = ("MMRPC_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TP_", "GLOO_", "COLOUR")
    for name, value in sorted(os.environ.items()):
        if name.startswith(names):
            print(f"env {name}={value}")

def hold():
    print("up", me(), os.getpid(), flush=True)
    while True:
        signal.pause()

def talk():
    """Prints until it is ended."""
    while True:
        hello()
        sys.stdout.flush()
        time.sleep(0.05)

def stubborn():
    """Says that it was told to end, and goes on."""
    told = f"told {me()} to end\\n".encode()
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, told))
    hold()

def family():
    """Starts a child that is in another session, and ignores SIGTERM."""
    child = subprocess.Popen(
        [sys.executable, "-c",
         "import signal; signal.signal(15, signal.SIG_IGN); print('child', flush=True);"
         "[signal.pause() for _ in range(100)]"],
        start_new_session=True)
    hold()

def wait_for_file():
    """Ends with the code that somebody writes to the file `end`."""
    print("up", me(), os.getpid(), flush=True)
    while not os.path.exists(f"end-{me()}"):
        time.sleep(0.05)
    print("about to end", file=sys.stderr, flush=True)
    sys.exit(int(open(f"end-{me()}").read() or 0))

def raises():
    raise ValueError("the learning rate is negative")

def bus():
    os.kill(os.getpid(), signal.SIGBUS)

def second_time_lucky():
    restarts = os.environ["MMRPC_RESTARTS"]
    print("attempt", restarts, flush=True)
    if restarts == "0":
        sys.exit(5)
'''


class Launch:
    """A running ``mmrpc launch``, ended by `end` if it has not ended before.

    Args:
        directory: Where it runs; made to hold the job and the config.
        config: Of the cluster.
        words: Further words of the command line.
        env: Further environment.
        command: ``launch`` or another command that takes a config.
        prefix: What runs it, such as ``salloc``.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        *words: str,
        env: dict[str, str] | None = None,
        command: str = "launch",
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        write_job(directory, config)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [*prefix, PYTHON, "-m", "mmrpc.cli", command, "cluster.json", *words],
            cwd=directory,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def text(self) -> str:
        """All output so far."""
        return "\n".join(self.lines)

    def until(self, *needles: str) -> Launch:
        """Waits until each of these texts has been printed."""
        with self._changed:
            seen = self._changed.wait_for(
                lambda: (
                    all(any(n in line for line in self.lines) for n in needles)
                    or not self._reader.is_alive()
                ),
                PATIENCE_S,
            )
        assert seen, (needles, self.text)
        assert all(needle in self.text for needle in needles), (needles, self.text)
        return self

    def pid_of(self, worker: str) -> int:
        """PID that a worker of `hold` or `wait_for_file` has printed."""
        self.until(f"up {worker} ")
        line = next(line for line in self.lines if f"up {worker} " in line)
        return int(line.split()[-1])

    def code(self, patience_s: float = PATIENCE_S) -> int:
        """Waits for the end and gives the exit code."""
        code = self.process.wait(patience_s)
        self._reader.join(patience_s)
        return code

    def end(self) -> None:
        """Ends everything, whatever happened."""
        for pid in [self.process.pid, *members(self.directory)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(PATIENCE_S)


@contextlib.contextmanager
def launching(
    directory: Path, config: dict[str, Any], *words: str, **kwargs: Any
) -> Iterator[Launch]:
    """A launch that is over when the block is, with nobody left."""
    launch = Launch(directory, config, *words, **kwargs)
    try:
        yield launch
    finally:
        launch.end()


def write_job(directory: Path, config: dict[str, Any]) -> Path:
    """Writes ``job.py`` and ``cluster.json``."""
    (directory / "job.py").write_text(JOB)
    path = directory / "cluster.json"
    path.write_text(json.dumps(config))
    return path


def one_role(target: str, workers: dict[str, int] | int = 2, **more: Any) -> dict[str, Any]:
    """A config of one role ``w``; by default of two workers on one node."""
    places = {"a": workers} if isinstance(workers, int) else workers
    return {
        "name": "test",
        "nodes": {node: {} for node in places},
        "roles": {"w": {"target": target, "workers": places}},
        "launch": {"grace_s": 5},
        **more,
    }


def members(directory: Path) -> dict[int, str]:
    """Command line by PID of each agent, guard, worker, and child of one, of a launch there.

    Agents enter the directory, and what they start is born in it.
    """
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            cwd = os.readlink(f"/proc/{name}/cwd")
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if cwd == str(directory) and command and "mmrpc.cli" not in command:
                found[int(name)] = command.strip()
    return found


def agents(directory: Path) -> list[int]:
    """PIDs of the agents of a launch in that directory."""
    return [pid for pid, text in members(directory).items() if text.endswith("mmrpc.launch.agent")]


def wait_until(holds: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Waits for a change that nothing tells us of."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.05)


def assert_nobody_left(directory: Path, patience_s: float = 10.0) -> None:
    """Fails if a process of a launch in that directory is there after 10 seconds."""
    deadline = time.monotonic() + patience_s
    while left := members(directory):
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.05)


def run_dir(directory: Path) -> Path:
    """Directory of the only run."""
    (only,) = (directory / "runs").iterdir()
    return only
