"""How an error speaks of names: which there are, and which was probably meant."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_NAMES = 12


def unknown(kind: str, name: str, valid: Iterable[str]) -> str:
    """Says that a name is not one of the valid ones, and which was probably meant."""
    names = list(valid)
    return f"there is no {kind} {name!r} (known: {listed(names)}){nearest(name, names)}"


def nearest(name: str, valid: list[str]) -> str:
    """Asks whether the valid name that is most like another one was meant, if one is."""
    near = difflib.get_close_matches(name, valid, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def listed(names: list[str]) -> str:
    """Lists names for an error, and not a thousand of them."""
    shown = ", ".join(names[:_MOST_NAMES]) or "none"
    return f"{shown}, ... ({len(names)} in all)" if len(names) > _MOST_NAMES else shown
