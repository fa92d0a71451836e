"""What an import costs, each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks.harness import Line
from benchmarks.lines.peers import peer
from benchmarks.lines.places import Places


def lines(places: Places) -> Iterator[Line]:
    """The line of the import."""
    theirs = _import("import torch, tensordict")
    yield Line(
        "import, beyond import torch",
        {
            "mmrpc": _import("import torch, mmrpc; mmrpc.MemoryMappedTensor"),
            "limit": _import("import torch"),
            **({} if places.quick else peer("tensordict", lambda m: {"tensordict": theirs})),
        },
        1.05,
        how_limit="import torch",
    )


def _import(statement: str) -> Callable[[], None]:
    def run() -> None:
        subprocess.run([sys.executable, "-c", statement], check=True)

    return run
