"""Runs the benchmark: ``python -m benchmarks [--quick] [GROUP ...] [--out DIR]``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time

from benchmarks import harness, machine, plots, results, scale, tables
from benchmarks.groups import GROUPS
from benchmarks.lines import peers, worlds
from benchmarks.lines.places import Places, places
from benchmarks.results import GroupResult

SCALE = "scale"


def main() -> int:
    """Measures, prints, and writes the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*GROUPS, SCALE]
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="small sizes: 3 minutes")
    parser.add_argument("--rounds", type=int, help=f"rounds that count ({harness.ROUNDS})")
    parser.add_argument("--out", help="where the results go (benchmarks/results/full or quick)")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(names):
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    out = options.out or f"benchmarks/results/{'quick' if options.quick else 'full'}"
    command = shlex.join(["python", "-m", "benchmarks", *(["--quick"] if options.quick else [])])
    start = time.monotonic()
    print(f"load average at the start: {_loads(os.getloadavg())}")
    for name in options.groups or names:
        print(f"{name}:", flush=True)
        with places(options.quick) as where:
            if name == SCALE:
                results.write(out, SCALE, scale.measure(where))
            else:
                _measure(name, where, options.rounds or harness.ROUNDS, command).save(out)
    print(f"load average at the end: {_loads(os.getloadavg())}")
    print(f"total: {(time.monotonic() - start) / 60:.1f} minutes")
    if missing := peers.missing():
        print("not installed, so left out:", ", ".join(missing))
    for path in _report(out):
        print("written:", path)
    return 0


def _measure(name: str, where: Places, rounds: int, command: str) -> GroupResult:
    group, before, start = GROUPS[name], os.getloadavg(), time.monotonic()
    started = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    lines = worlds.measure(group.lines, group.workers, where, rounds)
    duration_s = time.monotonic() - start
    print(f"  {name}: {duration_s:.1f} s", flush=True)
    return GroupResult(
        name, command, machine.describe(), before, os.getloadavg(), duration_s, lines, started
    )


def _report(out: str) -> list[str]:
    """Writes the tables and pictures of all groups that were measured, now or before."""
    found = [group for name in GROUPS if (group := GroupResult.load(out, name))]
    scale = results.read(out, SCALE)
    path = os.path.join(out, "results.md")
    with open(path, "w") as file:
        if found:
            file.write(f"{tables.heading(found, peers.missing())}\n\n{tables.full(found)}\n")
        if scale:
            file.write(f"\n{tables.scale(scale)}\n")
    return [path, *plots.draw(found, scale, out)]


def _loads(loads: tuple[float, float, float]) -> str:
    return ", ".join(f"{load:.2f}" for load in loads)


if __name__ == "__main__":
    sys.exit(main())
