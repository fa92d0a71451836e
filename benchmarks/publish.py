"""Puts what was measured into the documents: ``python -m benchmarks.publish [DIR]``.

Tables go between the comments ``<!-- benchmark: NAME -->`` and ``<!-- end -->``, pictures into
``docs/images``. So no number in a document is written by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks import plots, results, tables
from benchmarks.groups import GROUPS
from benchmarks.lines import peers

DOCUMENTS = ("README.md", "docs/performance.md")
FULL = "benchmarks/results/full"


def main(directory: str = FULL) -> int:
    """Fills the documents of the current directory."""
    found = [x for name in GROUPS if (x := results.GroupResult.load(directory, name))]
    scale = results.read(directory, "scale")
    profiles = results.read(directory, "profiles")
    parts = {
        "heading": tables.heading(found, peers.missing()),
        "summary": tables.summary(found),
        "full": tables.full(found),
        "scale": tables.scale(scale) if scale else "",
        "profiles": profiles["text"] if profiles else "",
    }
    for name in DOCUMENTS:
        path = Path(name)
        path.write_text(fill(path.read_text(), parts))
        print("filled:", path)
    for drawn in plots.draw(found, scale, "docs/images"):
        print("drawn:", drawn)
    return 0


def fill(text: str, parts: dict[str, str]) -> str:
    """Replaces what stands between the comments; a part that was not measured stays as it is."""

    def replace(match: re.Match[str]) -> str:
        new = parts[match[1]]
        return f"<!-- benchmark: {match[1]} -->\n{new}\n<!-- end -->" if new else match[0]

    return re.sub(r"<!-- benchmark: (\w+) -->\n.*?<!-- end -->", replace, text, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
