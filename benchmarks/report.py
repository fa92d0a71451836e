"""Results as JSON, as a Markdown table, and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import LIMIT, OURS, Result


def write(
    results: Sequence[Result], machine: dict[str, str], command: str, directory: str
) -> list[str]:
    """Writes the results; gives the paths."""
    os.makedirs(directory, exist_ok=True)
    paths = [os.path.join(directory, name) for name in ("results.json", "results.md")]
    with open(paths[0], "w") as file:
        data: dict[str, Any] = {"machine": machine, "command": command}
        data["lines"] = [result.as_dict() for result in results]
        json.dump(data, file, indent=1)
    with open(paths[1], "w") as file:
        file.write(markdown(results, machine, command))
    picture = os.path.join(directory, "results.svg")
    if plot(results, picture):
        paths.append(picture)
    return paths


def markdown(results: Sequence[Result], machine: dict[str, str], command: str) -> str:
    """The table that the documents show."""
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    rows = [
        f"Measured by `{command}` on: {facts}.",
        "",
        "| work | mmrpc | ratio to the limit | asked | peers, ratio to the limit | limit |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        ratios = result.ratios
        peers = ", ".join(
            f"{name} {ratio:.2f}x" for name, ratio in ratios.items() if name not in (OURS, LIMIT)
        )
        ours = f"{ratios[OURS]:.2f}x" if OURS in ratios else ""
        asked = f"≤ {result.asked:g}x" if result.asked else ""
        time = result.note if not ratios else duration(result.median_s(OURS))
        note = f" ({result.note})" if ratios and result.note else ""
        rows.append(
            f"| {result.name}{note} | {time} | {ours} | {asked} | {peers} | {result.how_limit} |"
        )
    return "\n".join(rows) + "\n"


def duration(seconds: float) -> str:
    """A time with a unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def plot(results: Sequence[Result], path: str) -> bool:
    """Draws the ratios, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    from matplotlib import pyplot

    shown = [result for result in results if OURS in result.ratios]
    names = sorted({name for result in shown for name in result.ratios} - {LIMIT, OURS})
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(shown) + 1.2))
    rows = range(len(shown))
    for name in [*names, OURS]:
        points = [(result.ratios.get(name), row) for row, result in zip(rows, shown, strict=True)]
        xs = [x for x, _ in points if x is not None]
        ys = [y for x, y in points if x is not None]
        axes.plot(xs, ys, "o", label=name, markersize=8 if name == OURS else 5)
    axes.axvline(1, color="black", linewidth=1, label=LIMIT)
    axes.set_xscale("log")
    axes.set_yticks(list(rows), [result.name for result in shown])
    axes.invert_yaxis()
    axes.set_xlabel("time, as a multiple of the limit's (less is better)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
    return True
