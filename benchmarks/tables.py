"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.groups import GROUPS
from benchmarks.harness import LIMIT, OURS, Result
from benchmarks.results import GroupResult

HEADER = ("work", "mmrpc", "CPU", "to the limit", "asked", "others, to the limit", "the limit")


def duration(seconds: float) -> str:
    """A time of three digits, with a unit that suits it."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        # Half of the last digit early, so that no time is rounded to 1000 of a smaller unit.
        if seconds >= 0.9995 * unit:
            return f"{digits(seconds / unit)} {name}"
    return f"{seconds * 1e9:.0f} ns"


def digits(number: float) -> str:
    """Three digits, never an exponent."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"


def ratio(number: float) -> str:
    """A multiple, to two digits behind the point where that says something."""
    return f"{number:.2f}x" if number < 9.995 else f"{number:,.0f}x"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def facts(machine: dict[str, str]) -> str:
    """The machine and the versions in one line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def heading(found: Sequence[GroupResult], missing: Sequence[str] = ()) -> str:
    """What was run, on what, and how busy the machine was."""
    minutes = sum(group.duration_s for group in found) / 60
    loads = [load for group in found for load in (group.load_start[0], group.load_end[0])]
    rounds = min(len(times) for group in found for x in group.lines for times in x.wall_s.values())
    left_out = f" Not installed, so left out: {', '.join(missing)}." if missing else ""
    return (
        f"Measured by `{found[0].command}`, {minutes:.1f} minutes in all{_when(found)}, medians of"
        f" {rounds} rounds,"
        f" on: {facts(found[0].machine)}. The load average before and after the groups was"
        f" {min(loads):.1f} to {max(loads):.1f}.{left_out}"
    )


def _when(found: Sequence[GroupResult]) -> str:
    """When the groups were measured: not always in one go."""
    times = sorted(group.started for group in found)
    return f", groups started from {times[0]} to {times[-1]} UTC" if times[0] else ""


def full(found: Sequence[GroupResult]) -> str:
    """A table for each group."""
    parts = []
    for group in found:
        if group.lines:
            rows = [_row(line) for line in group.lines]
            parts.append(f"### {GROUPS[group.group].title}\n\n{table(HEADER, rows)}")
    return "\n\n".join(parts)


def _row(line: Result) -> tuple[str, ...]:
    base = LIMIT if LIMIT in line.wall_s else OURS
    ratios = line.ratios_to(base)
    others = ", ".join(
        f"{name} {ratio(value)}" for name, value in ratios.items() if name not in (OURS, LIMIT)
    )
    to_ours = " of mmrpc's time" if base == OURS and others else ""
    return (
        f"{line.name} ({line.note})" if line.note else line.name,
        duration(line.median_s(OURS)),
        duration(line.median_cpu_s(OURS)),
        ratio(ratios[OURS]) if base == LIMIT else "",
        f"≤ {line.asked:g}x" if line.asked else "",
        others + to_ours,
        line.how_limit,
    )


def summary(found: Sequence[GroupResult]) -> str:
    """The short table."""
    columns = ("tensordict", "plain torch RPC")
    rows = []
    for line in summarised(found):
        ratios = line.ratios
        others = [f"{n} {ratio(r)}" for n, r in ratios.items()
                  if n not in (OURS, LIMIT, *columns)]  # fmt: skip
        rows.append(
            (
                line.summary,
                duration(line.median_s(OURS)),
                f"**{ratio(ratios[OURS])}**",
                *(ratio(ratios[name]) if name in ratios else "" for name in columns),
                ", ".join(others),
            )
        )
    return table(("work", "mmrpc", "mmrpc ÷ limit", "tensordict", "torch RPC", "others"), rows)


def summarised(found: Sequence[GroupResult]) -> list[Result]:
    """The lines of the short table, which all have a limit."""
    return [x for group in found for x in group.lines if x.summary and LIMIT in x.wall_s]


def scale(form: dict[str, Any]) -> str:
    """The tables of what grows."""
    parts = []
    for series in form["series"]:
        names = list(series["seconds"])
        rows = []
        for i, label in enumerate(series["labels"]):
            times = [duration(series["seconds"][name][i]) for name in names]
            sizes = [f"{values[i]:,} B" for values in series["bytes"].values()]
            rows.append((label, *times, *sizes))
        header = (series["against"], *names, *series["bytes"])
        parts.append(f"**{series['title']}**\n\n{table(header, rows)}")
    return "\n\n".join(parts)
