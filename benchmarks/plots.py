"""Results as pictures; needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.groups import GROUPS
from benchmarks.harness import OURS, Result
from benchmarks.results import GroupResult
from benchmarks.tables import summarised

# Okabe and Ito's colours, which colour-blind people can tell apart, and a shape for each as well.
STYLES = {
    "mmrpc": ("#0072B2", "o"),
    "tensordict": ("#D55E00", "s"),
    "plain torch RPC": ("#CC79A7", "D"),
    "np.memmap": ("#009E73", "^"),
    "safetensors": ("#E69F00", "v"),
    "HF datasets": ("#56B4E9", "P"),
    "Ray": ("#6A3D9A", "X"),
    "torch.save, torch.load": ("#8C6D31", "p"),
}
ALIASES = {
    "Ray, NumPy": "Ray",
    "torch.save": "torch.save, torch.load",
    "torch.load, mapped": "torch.save, torch.load",
}
SETTINGS = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",  # a page may be dark
    "svg.fonttype": "none",  # text stays text: a third of the size, and it can be searched
    "svg.hashsalt": "mmrpc",  # the same numbers give the same file
}


def draw(found: Sequence[GroupResult], scale: dict[str, Any] | None, directory: str) -> list[str]:
    """Draws what there is, if matplotlib is installed; gives the paths."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    os.makedirs(directory, exist_ok=True)
    paths = []
    with matplotlib.rc_context(SETTINGS):
        parts = [(GROUPS[group.group].title, _drawn(group.lines)) for group in found]
        if any(lines for _, lines in parts):
            paths.append(_ratios(parts, os.path.join(directory, "ratios.svg")))
        short = [("", _drawn(summarised(found)))]
        if short[0][1]:
            paths.append(_ratios(short, os.path.join(directory, "summary.svg"), short=True))
        if scale:
            paths.append(_scale(scale["series"], os.path.join(directory, "scale.svg")))
    return paths


def _drawn(lines: Sequence[Result]) -> list[Result]:
    return [line for line in lines if OURS in line.ratios]


def _ratios(parts: Sequence[tuple[str, list[Result]]], path: str, short: bool = False) -> str:
    """Dots on a logarithmic axis, a row for each line; the limit is a line at 1."""
    from matplotlib import pyplot

    rows: list[tuple[str, Result | None]] = []
    for title, lines in parts:
        if lines:
            rows += [(title, None)] if title else []
            rows += [(line.summary if short else line.name, line) for line in lines]
    figure, axes = pyplot.subplots(figsize=(9.5, 0.27 * len(rows) + 1.1))
    seen = set()
    for y, (_, line) in enumerate(rows):
        if line is None:
            continue
        axes.axhline(y, color="#eeeeee", linewidth=0.8, zorder=0)
        for name, value in sorted(line.ratios.items(), key=lambda item: item[0] == OURS):
            name = ALIASES.get(name, name)
            if name in STYLES:
                colour, marker = STYLES[name]
                size = 42 if name == OURS else 26
                axes.scatter(value, y, s=size, color=colour, marker=marker, zorder=3, linewidths=0)
                seen.add(name)
    axes.axvline(1, color="black", linewidth=1, zorder=2)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    for tick, (_, line) in zip(axes.get_yticklabels(), rows, strict=True):
        if line is None:
            tick.set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _plain_ticks(axes.xaxis, "x")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("time, as a multiple of the limit's (the line at 1x); less is better")
    handles = [
        pyplot.Line2D([], [], color=colour, marker=marker, linestyle="", markersize=6, label=name)
        for name, (colour, marker) in STYLES.items()
        if name in seen
    ]
    figure.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(handles),
        frameon=False, columnspacing=1.2, handletextpad=0.2,
    )  # fmt: skip
    figure.tight_layout()
    return _save(figure, path)


def _plain_ticks(axis: Any, suffix: str = "") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{suffix}"))
    axis.set_minor_formatter(NullFormatter())


def _scale(series: Sequence[dict[str, Any]], path: str) -> str:
    """A panel for each series: seconds against what grows, both logarithmic."""
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, grid = pyplot.subplots(2, 2, figsize=(9.5, 6.4))
    colours = [colour for colour, _ in STYLES.values()]
    for axes, one in zip(grid.flat, series, strict=True):
        for (name, seconds), colour in zip(one["seconds"].items(), colours, strict=False):
            milliseconds = [1e3 * value for value in seconds]
            axes.plot(one["xs"], milliseconds, "o-", color=colour, label=name, markersize=4)
        axes.set_xscale("log", base=2 if one["against"] in ("size", "processes") else 10)
        axes.set_yscale("log")
        axes.set_xticks(one["xs"], one["labels"])
        axes.xaxis.set_minor_locator(NullLocator())
        _plain_ticks(axes.yaxis)
        low, high = axes.get_ylim()
        # Two decades at least: a flat line is to look flat. Room for the legend above.
        axes.set_ylim(low, max(high, low * 100) * 8)
        axes.set_title(one["title"], fontsize=9, fontweight="bold", loc="left")
        axes.set_ylabel("ms")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout(h_pad=2, w_pad=2)
    return _save(figure, path)


def _save(figure: Any, path: str) -> str:
    from matplotlib import pyplot

    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return path
