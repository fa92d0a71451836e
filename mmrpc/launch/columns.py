"""Rows of text as aligned columns, for a terminal of any width or a pipe. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Pads each cell to the widest of its column.

    Nothing is cut or folded, so that a path can be copied and a line can be searched for: put
    last what may be long.

    Args:
        rows: With the same number of cells each.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()
