"""What the launcher shows: workers' lines with their names, and its own words."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable


class Console:
    """Standard output and error, shared by all workers.

    Args:
        names: What can stand before a line, for one width.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._width = max(map(len, names), default=0)

    def line(self, name: str, text: str, stream: str = "stdout") -> None:
        """Shows a worker's or an agent's line.

        Raises:
            BrokenPipeError: If nobody reads it any more.
        """
        self._write(sys.stderr if stream == "stderr" else sys.stdout, name, text)

    def say(self, text: str) -> None:
        """Says something of the launcher's own."""
        for line in text.splitlines():
            print(f"mmrpc: {line}", file=sys.stderr, flush=True)  # noqa: T201

    def _write(self, file: TextIO, name: str, text: str) -> None:
        file.write(f"{name.ljust(self._width)} | {text}\n")
        file.flush()
