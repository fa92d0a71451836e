"""What the callee of a call does in the lines on RPC."""

from __future__ import annotations

import torch

from benchmarks.lines import raw

_kept: dict[str, torch.Tensor] = {}


def nothing(x: object) -> None:
    """Leaves its argument alone."""


def total(x: torch.Tensor) -> float:
    """Reads all."""
    return float(x.sum())


def keep(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """Maps a file once and for all."""
    _kept[name] = raw.map_tensor(name, shape, dtype)


def total_kept(name: str) -> float:
    """Reads all of what was kept."""
    return float(_kept[name].sum())


def gather(x: torch.Tensor, rows: torch.Tensor) -> int:
    """Reads some rows."""
    return int(x[rows].sum())


def gather_kept(name: str, rows: torch.Tensor) -> int:
    """Reads some rows of what was kept."""
    return int(_kept[name].index_select(0, rows).sum())
