"""The handshake's report as text: the first thing that a launched job shows. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mmrpc.rpc.handshake.report import MountReport, PathReport

LEAD = "mmrpc: "
"""Begins each line, so that a launcher can tell them from the job's own."""


def render(report: PathReport) -> str:
    """Gives the lines with their lead."""
    return "\n".join(LEAD + line for line in lines(report))


def lines(report: PathReport) -> Iterator[str]:
    """Gives the nodes, what each proved about each mount, and the warnings."""
    workers = sum(len(node.ranks) for node in report.nodes)
    names = ", ".join(f"{node.node} ({node.address})" for node in report.nodes)
    yield f"{workers} workers have met, on {names}"
    if report.mounts:
        rows = [("MOUNT", "NODE", "PATH", "FILE SYSTEM", "READ", "WRITE", "SAME BY", "READER")]
        rows += map(_row, report.mounts)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield "  ".join(cells).rstrip()
    yield from (f"warning: {text}" for text in report.warnings)


def _row(mount: MountReport) -> tuple[str, str, str, str, str, str, str, str]:
    return (
        mount.mount,
        mount.node,
        mount.path,
        mount.implementation or mount.file_system,
        _yes(mount.readable),
        _yes(mount.writable),
        mount.proof or "-",
        mount.reader or "-",
    )


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
