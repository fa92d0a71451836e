"""Peers that may be installed; those that are not are left out, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import util
from typing import Any

PEERS = ("tensordict", "numpy", "safetensors", "ray", "datasets")


def peer(name: str, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """The alternatives of a peer, or none if it is not installed."""
    return make(importlib.import_module(name)) if installed(name) else {}


def missing() -> list[str]:
    """The peers that are not installed."""
    return [name for name in PEERS if not installed(name)]


def installed(name: str) -> bool:
    """Whether a module, or the package that it is in, is there."""
    return util.find_spec(name.partition(".")[0]) is not None
