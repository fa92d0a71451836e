"""An agent as the launcher sees it: commands go in, events come out into one queue.

The agent ends when its input does, so to close a channel is to end the agent, and so is the
launcher's own death, however it comes.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from mmrpc.launch import messages

if TYPE_CHECKING:
    import socket
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
    """A pair of streams to an agent, and a thread that reads one of them.

    Args:
        node: The agent's node; comes with each event.
        events: Where ``(node, event)`` goes.
        to_agent: Takes commands.
        from_agent: Gives events.
    """

    def __init__(
        self,
        node: str,
        events: SimpleQueue[tuple[str, Any]],
        to_agent: IO[bytes],
        from_agent: IO[bytes],
    ) -> None:
        self.node, self._events = node, events
        self._to_agent, self._from_agent = to_agent, from_agent
        self._reader = threading.Thread(target=self._read, daemon=True)

    def send(self, command: messages.Command) -> None:
        """Sends a command; one to an agent that has ended is dropped, `Ended` tells of it."""
        with contextlib.suppress(OSError, ValueError):
            self._to_agent.write(messages.encode(command))
            self._to_agent.flush()

    def hang_up(self) -> None:
        """Tells the agent to end, by ending what it reads."""
        with contextlib.suppress(OSError):
            self._to_agent.close()

    def close(self, timeout_s: float) -> bool:
        """Ends the agent, by force if that takes too long; gives whether it did by itself."""
        self.hang_up()
        self._reader.join(timeout_s)
        ended = not self._reader.is_alive()
        if not ended:
            self._force()
            self._reader.join()
        return ended

    def _read(self) -> None:
        with self._from_agent, contextlib.suppress(ConnectionError):
            for line in self._from_agent:
                event = messages.decode(line)
                self._events.put((self.node, event or Noise(_text(line))))
        self._events.put((self.node, self._end()))

    def _end(self) -> Ended:
        """Waits for what is at this end, if anything is."""
        raise NotImplementedError

    def _force(self) -> None:
        raise NotImplementedError


class ProcessChannel(Channel):
    """By the standard streams of a child: the agent itself, or ``ssh`` or ``srun``.

    Args:
        node: See `Channel`.
        events: See `Channel`.
        command: What to run.

    Raises:
        OSError: If the command cannot be run.
    """

    def __init__(self, node: str, events: SimpleQueue[tuple[str, Any]], command: list[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for the launcher, which tells the agents in order.
            start_new_session=True,
        )
        super().__init__(
            node,
            events,
            cast("IO[bytes]", self._process.stdin),
            cast("IO[bytes]", self._process.stdout),
        )
        self._stderr_tail: deque[str] = deque(maxlen=_STDERR_LINES)
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()
        self._reader.start()

    def _read_stderr(self) -> None:
        with cast("IO[bytes]", self._process.stderr) as stream:
            for line in stream:
                text = _text(line)
                self._stderr_tail.append(text)
                self._events.put((self.node, Noise(text)))

    def _end(self) -> Ended:
        self._stderr_reader.join()
        return Ended(self._process.wait(), list(self._stderr_tail))

    def _force(self) -> None:
        self._process.kill()


class SocketChannel(Channel):
    """By a connection that an agent, started by hand, has made to us.

    Args:
        node: See `Channel`.
        events: See `Channel`.
        connection: The connection; the channel owns it.
        from_agent: A stream on it, of which the first line may have been read.
    """

    def __init__(
        self,
        node: str,
        events: SimpleQueue[tuple[str, Any]],
        connection: socket.socket,
        from_agent: IO[bytes],
    ) -> None:
        self._connection = connection
        super().__init__(node, events, connection.makefile("wb"), from_agent)
        self._reader.start()

    def hang_up(self) -> None:
        """See `Channel.hang_up`."""
        import socket

        super().hang_up()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self, timeout_s: float) -> bool:
        """See `Channel.close`."""
        ended = super().close(timeout_s)
        self._connection.close()
        return ended

    def _end(self) -> Ended:
        return Ended(None, [])

    def _force(self) -> None:
        import socket

        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")
