"""An agent as the launcher sees it: commands go in, events come out into one queue."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from mmrpc.launch import messages

if TYPE_CHECKING:
    from queue import SimpleQueue

_STDERR_LINES = 20


@dataclass(frozen=True, slots=True)
class Noise:
    """What something other than the agent's protocol printed on the way: ssh, a login shell."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The channel is closed.

    Attributes:
        exit_code: Of the process at this end of it (the agent's own if that is local, or that of
            ``ssh`` or ``srun``); None if there is none.
        stderr_tail: Last lines that it printed.
    """

    exit_code: int | None
    stderr_tail: list[str]


class Channel:
    """A child process whose standard input and output lead to an agent.

    The agent ends when its input does, so to `close` is to end it, and so is our own death.

    Args:
        node: The agent's node; comes with each event.
        command: What to run.
        events: Where ``(node, event)`` goes.

    Raises:
        OSError: If the command cannot be run.
    """

    def __init__(self, node: str, command: list[str], events: SimpleQueue[tuple[str, Any]]) -> None:
        self.node, self._events = node, events
        self._stderr_tail: deque[str] = deque(maxlen=_STDERR_LINES)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for the launcher, which tells the agents in order.
            start_new_session=True,
        )
        self._input = cast("IO[bytes]", self._process.stdin)
        self._threads = [
            threading.Thread(target=read, args=(stream,), daemon=True)
            for read, stream in (
                (self._read_events, self._process.stdout),
                (self._read_noise, self._process.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """PID of the process at this end."""
        return self._process.pid

    def send(self, command: messages.Command) -> None:
        """Sends a command; one to an agent that has ended is dropped, `Ended` tells of it."""
        with contextlib.suppress(OSError, ValueError):
            self._input.write(messages.encode(command))
            self._input.flush()

    def close(self, timeout_s: float) -> bool:
        """Ends the agent, and kills the process at this end if that takes too long.

        Returns:
            Whether it ended by itself.
        """
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(timeout_s)
            return True
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            return False
        finally:
            for thread in self._threads:
                thread.join()

    def _read_events(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                event = messages.decode(line)
                self._events.put((self.node, event or Noise(_text(line))))
        self._threads[1].join()
        self._events.put((self.node, Ended(self._process.wait(), list(self._stderr_tail))))

    def _read_noise(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = _text(line)
                self._stderr_tail.append(text)
                self._events.put((self.node, Noise(text)))


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")
