"""What the launcher shows: workers' lines with their names, and its own words."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Console:
    """Standard output and error, shared by all workers.

    One that cannot be written to, on a full disk or a terminal that is gone, is silent from then
    on: the job goes on, and its logs have every line.

    Args:
        names: What can stand before a line, for one width.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._width = max(map(len, names), default=0)

    def line(self, name: str, text: str, stream: str = "stdout") -> None:
        """Shows a worker's or an agent's line.

        Raises:
            BrokenPipeError: The first time that nobody reads it any more.
        """
        self._write(stream, f"{name.ljust(self._width)} | {text}")

    def say(self, text: str) -> None:
        """Says something of the launcher's own; that nobody hears it changes nothing."""
        with contextlib.suppress(BrokenPipeError):
            for line in text.splitlines():
                self._write("stderr", f"mmrpc: {line}")

    def _write(self, stream: str, text: str) -> None:
        file = sys.stderr if stream == "stderr" else sys.stdout
        # Workers may print what the launcher's locale cannot.
        text = text.encode(file.encoding, "backslashreplace").decode(file.encoding)
        try:
            file.write(text + "\n")
            file.flush()
        except OSError as error:
            # What is still in the buffer must not be tried again, at exit at the latest.
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), file.fileno())
            if isinstance(error, BrokenPipeError):
                raise
