"""How one line is measured: its alternatives in turn, in one process, round by round.

A machine's speed drifts, so only what ran side by side is compared: each round runs every
alternative once, in an order that rotates, and the ratio is taken within the round. What is
reported is the median over the rounds.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

OURS, LIMIT = "mmrpc", "limit"


@dataclass
class Alternative:
    """One way to do the work of a line.

    Attributes:
        run: The work; called `Line.calls` times in a row for one sample.
        before: Called before each sample, untimed.
        after: Called after each sample, untimed.
    """

    run: Callable[[], Any]
    before: Callable[[], Any] | None = None
    after: Callable[[], Any] | None = None


@dataclass
class Line:
    """One kind of work, and the ways to do it.

    Attributes:
        name: What is done.
        alternatives: The ways, by name: ``mmrpc``, ``limit`` (the best hand-written code for
            the same work) and peers.
        asked: The ratio of ours to the limit that is aimed at, if there is one.
        calls: Calls in a sample; the time of a sample is divided by it.
        how_limit: What the limit does, in a few words.
    """

    name: str
    alternatives: dict[str, Alternative | Callable[[], Any]]
    asked: float | None = None
    calls: int = 1
    how_limit: str = ""
    note: str = ""


@dataclass
class Result:
    """What was measured of one line.

    Attributes:
        wall_s: Seconds of each round, by alternative.
        cpu_s: CPU seconds of this process in each round, by alternative.
        ratios: Median over the rounds of each alternative's time to the limit's.
    """

    name: str
    asked: float | None
    how_limit: str
    note: str
    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    load: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def ratios(self) -> dict[str, float]:
        limit = self.wall_s.get(LIMIT)
        if not limit:
            return {}
        return {
            name: statistics.median(a / b for a, b in zip(times, limit, strict=True))
            for name, times in self.wall_s.items()
        }

    def median_s(self, name: str) -> float:
        return statistics.median(self.wall_s[name])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratios": self.ratios}


def measure(line: Line, rounds: int) -> Result:
    """Measures a line; the first round is not counted."""
    result = Result(line.name, line.asked, line.how_limit, line.note, load=os.getloadavg())
    ways = {
        name: way if isinstance(way, Alternative) else Alternative(way)
        for name, way in line.alternatives.items()
    }
    names = list(ways)
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            wall, cpu = _sample(ways[name], line.calls)
            if number:
                result.wall_s.setdefault(name, []).append(wall)
                result.cpu_s.setdefault(name, []).append(cpu)
    return result


def _sample(way: Alternative, calls: int) -> tuple[float, float]:
    if way.before:
        way.before()
    gc.collect()
    gc.disable()  # a full collection with torch loaded takes 90 ms, in whatever runs then
    try:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(calls):
            way.run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        gc.enable()
    if way.after:
        way.after()
    return wall / calls, cpu / calls


def run(lines: Iterable[Line], rounds: int, say: Callable[[str], None]) -> Iterator[Result]:
    """Measures lines one after the other, and tells of each when it is done."""
    for line in lines:
        result = measure(line, rounds)
        ratios = "  ".join(f"{n} {r:.2f}x" for n, r in result.ratios.items() if n != LIMIT)
        say(f"{line.name}: {ratios or f'{result.median_s(OURS) * 1e3:.3f} ms'}")
        yield result
