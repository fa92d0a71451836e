"""The groups of lines, in the order in which they are measured and shown."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.lines import (
    advice,
    checkpoints,
    data,
    files,
    imports,
    rpc,
    store,
    swap,
    train,
    trees,
    values,
    views,
)
from benchmarks.lines.worlds import Lines


@dataclass(frozen=True)
class Group:
    """Lines that are measured together.

    Attributes:
        title: Its heading.
        lines: Makes the lines, where they are measured.
        workers: Size of the RPC group that they need; 0 if they need none.
    """

    title: str
    lines: Lines
    workers: int = 0


GROUPS = {
    "imports": Group("Import", imports.lines),
    "files": Group("Files", files.lines),
    "views": Group("Views and pickling", views.lines),
    "data": Group("Datasets", data.lines),
    "checkpoints": Group("Loading from files", checkpoints.lines),
    "rpc": Group("Calls", rpc.lines, 2),
    "values": Group("Plain tensors by value", values.lines, 2),
    "store": Group("Beside an object store", store.lines, 2),
    "trees": Group("Many small tensors", trees.lines, 2),
    "train": Group("Parameter server", train.lines, 3),
    "swap": Group("Only the import swapped", swap.lines),
    "cold": Group("Advice for files that are not in memory", advice.cold),
    "huge": Group("Huge pages", advice.huge, 1),
}
