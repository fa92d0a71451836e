"""Peers that may be installed; those that are not are left out, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

MISSING: set[str] = set()
"""Peers that were asked for and are not installed."""


def peer(name: str, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """The alternatives of a peer, or none if it is not installed."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        MISSING.add(name)
        return {}
    return make(module)
