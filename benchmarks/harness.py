"""How one line is measured: its alternatives in turn, in one process, round by round.

A machine's speed drifts, so only what ran side by side is compared: each round runs every
alternative once, in an order that rotates, and the ratio is taken within the round. What is
reported is the median over the rounds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OURS, LIMIT = "mmrpc", "limit"
ROUNDS = 7


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
        note: What else is to be said of ours, such as a size.
        summary: Its name in the short table, if it is in that.
        pids: Processes of its own that take part in the work.
        of_cpu: Whether CPU time is what is compared, not wall time.
    """

    name: str
    alternatives: dict[str, Alternative | Callable[[], Any]]
    asked: float | None = None
    calls: int = 1
    how_limit: str = ""
    note: str = ""
    summary: str = ""
    pids: Sequence[int] = ()
    of_cpu: bool = False


@dataclass
class Result:
    """What was measured of one line.

    Attributes:
        wall_s: Seconds of each round, by alternative.
        cpu_s: CPU seconds of all processes that take part, in each round, by alternative.
        load: The load averages when the line began.
    """

    name: str
    asked: float | None
    how_limit: str
    note: str
    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    load: tuple[float, float, float] = (0.0, 0.0, 0.0)
    summary: str = ""
    of_cpu: bool = False

    @property
    def compared_s(self) -> dict[str, list[float]]:
        """The times that are compared."""
        return self.cpu_s if self.of_cpu else self.wall_s

    @property
    def ratios(self) -> dict[str, float]:
        """Median over the rounds of each alternative's time to the limit's."""
        return self.ratios_to(LIMIT)

    def ratios_to(self, base: str) -> dict[str, float]:
        """Median over the rounds of each alternative's time to that of one of them."""
        bases = self.compared_s.get(base)
        if not bases:
            return {}
        return {
            name: statistics.median(a / b for a, b in zip(times, bases, strict=True))
            for name, times in self.compared_s.items()
        }

    def median_s(self, name: str) -> float:
        """The middle of the times of an alternative that are compared."""
        return statistics.median(self.compared_s[name])

    def median_cpu_s(self, name: str) -> float:
        """The middle of the CPU times of an alternative."""
        return statistics.median(self.cpu_s[name])

    def as_dict(self) -> dict[str, Any]:
        """The form that is kept as JSON."""
        return {**asdict(self), "ratios": self.ratios}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Result:
        """What `as_dict` gave."""
        return cls(**{name: value for name, value in form.items() if name != "ratios"})


def measure(line: Line, rounds: int, pids: Sequence[int] = ()) -> Result:
    """Measures a line; the first round is not counted.

    Args:
        line: What to measure.
        rounds: Rounds that count.
        pids: Other processes that take part in the work, whose CPU time counts as well.
    """
    result = Result(line.name, line.asked, line.how_limit, line.note)
    result.load, result.summary, result.of_cpu = os.getloadavg(), line.summary, line.of_cpu
    ways = {
        name: way if isinstance(way, Alternative) else Alternative(way)
        for name, way in line.alternatives.items()
    }
    names = list(ways)
    with _quick_collections():
        for number in range(rounds + 1):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                wall, cpu = _sample(ways[name], line.calls, [*pids, *line.pids])
                if number:
                    result.wall_s.setdefault(name, []).append(wall)
                    result.cpu_s.setdefault(name, []).append(cpu)
    return result


@contextlib.contextmanager
def _quick_collections() -> Iterator[None]:
    """Keeps the garbage collector to what is made from now on: all of torch takes it 90 ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _sample(way: Alternative, calls: int, pids: Sequence[int]) -> tuple[float, float]:
    if way.before:
        way.before()
    gc.collect()
    gc.disable()  # else it runs in whatever allocates most
    try:
        cpu, wall = cpu_s(pids), time.perf_counter()
        for _ in range(calls):
            way.run()
        wall, cpu = time.perf_counter() - wall, cpu_s(pids) - cpu
    finally:
        gc.enable()
    if way.after:
        way.after()
    return wall / calls, cpu / calls


def cpu_s(pids: Sequence[int] = ()) -> float:
    """CPU seconds of this process, of its children that have ended, and of other processes."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            total += time.clock_gettime(process_clock(pid))
    return total


def process_clock(pid: int) -> int:
    """The clock of a process's CPU time: what clock_getcpuclockid(3) computes on Linux."""
    scheduler_clock = 2
    return (~pid << 3) | scheduler_clock


def run(
    lines: Iterable[Line], rounds: int, say: Callable[[str], None], pids: Sequence[int] = ()
) -> Iterator[Result]:
    """Measures lines one after the other, and tells of each when it is done."""
    for line in lines:
        start = time.monotonic()
        result = measure(line, rounds, pids)
        base = LIMIT if LIMIT in result.wall_s else OURS
        ratios = "  ".join(f"{n} {r:.2f}x" for n, r in result.ratios_to(base).items() if n != base)
        say(
            f"{line.name}: {result.median_s(OURS) * 1e3:.3f} ms"
            f"{';' if ratios else ''} {ratios} ({time.monotonic() - start:.1f} s)"
        )
        yield result
