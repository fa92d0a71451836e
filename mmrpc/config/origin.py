"""Where each value of a config came from: pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

Key = tuple[str, ...]
"""Path of a value in the tree: ``("nodes", "a", "host")``."""


@dataclass(frozen=True, slots=True)
class Place:
    """One place in a config file, or one ``--set``.

    Attributes:
        file: Path of the file as it was given, or ``--set`` and its text.
        line: Counted from 1; None if not known.
        column: Counted from 1; None if not known.
    """

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part)


@dataclass(frozen=True, eq=False)
class Origin:
    """The places of a config's keys. Two configs are equal wherever they came from.

    Attributes:
        file: The file, if there was one.
        places: The key of each value that was given, and where.
    """

    file: str | None = None
    places: Mapping[Key, Place] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0

    def find(self, key: Key | str) -> Place | None:
        """Gives the place of a key, or of the nearest part around it that was given."""
        parts = tuple(key.split(".")) if isinstance(key, str) else key
        for length in range(len(parts), -1, -1):
            place = self.places.get(parts[:length])
            if place is not None:
                return place
        return Place(self.file) if self.file else None
