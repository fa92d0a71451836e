"""What was measured, as JSON: a file for each group, so that a group can be measured again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness import Result


@dataclass
class GroupResult:
    """One run of one group.

    Attributes:
        group: Its name.
        command: What measured it.
        machine: What it was measured on.
        load_start: The load averages over 1, 5 and 15 minutes at its start.
        load_end: The same at its end.
        duration_s: Seconds that it took.
        lines: What was measured.
        started: When, in UTC. Groups that were measured again are seen by it.
    """

    group: str
    command: str
    machine: dict[str, str]
    load_start: tuple[float, float, float]
    load_end: tuple[float, float, float]
    duration_s: float
    lines: list[Result] = field(default_factory=list)
    started: str = ""

    def save(self, directory: str) -> str:
        """Writes it; gives the path."""
        form: dict[str, Any] = asdict(self)
        form["lines"] = [line.as_dict() for line in self.lines]
        return write(directory, self.group, form)

    @classmethod
    def load(cls, directory: str, group: str) -> GroupResult | None:
        """What was saved, or None."""
        form = read(directory, group)
        if form is None:
            return None
        form["lines"] = [Result.from_dict(line) for line in form["lines"]]
        return cls(**form)


def write(directory: str, name: str, form: dict[str, Any]) -> str:
    """Writes a JSON file; gives its path."""
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f"{name}.json")
    with open(path, "w") as file:
        json.dump(form, file, indent=1)
    return path


def read(directory: str, name: str) -> dict[str, Any] | None:
    """Reads a JSON file, if it is there."""
    try:
        with open(os.path.join(directory, f"{name}.json")) as file:
            form: dict[str, Any] = json.load(file)
            return form
    except FileNotFoundError:
        return None
