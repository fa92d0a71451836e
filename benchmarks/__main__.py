"""Runs the benchmark: ``python -m benchmarks [--quick] [--only NAME] [--out DIR]``."""

from __future__ import annotations

import argparse
import shlex
import sys

from benchmarks import harness, machine, report
from benchmarks.harness import Result
from benchmarks.lines import data, files, imports, peers, rpc, train, trees, views
from benchmarks.lines.places import places

LINES = {
    "imports": imports.lines,
    "files": files.lines,
    "views": views.lines,
    "data": data.lines,
}
WORLDS = {"rpc": rpc.results, "trees": trees.results, "train": train.results}


def main() -> int:
    """Measures, prints, and writes the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, 7 rounds: 3 minutes")
    parser.add_argument("--rounds", type=int, help="rounds that count (7, or 11 without --quick)")
    parser.add_argument("--only", choices=[*LINES, *WORLDS], action="append", help="these alone")
    parser.add_argument("--out", default="benchmarks/results", help="where the results go")
    options = parser.parse_args()
    rounds = options.rounds or (7 if options.quick else 11)
    chosen = options.only or [*LINES, *WORLDS]
    results: list[Result] = []
    with places(options.quick) as where:
        for name in chosen:
            print(f"{name}:", flush=True)
            if name in LINES:
                say = lambda text: print(" ", text, flush=True)  # noqa: E731
                results.extend(harness.run(LINES[name](where), rounds, say))
            else:
                results.extend(WORLDS[name](where, rounds))
    if peers.MISSING:
        print("not installed, so left out:", ", ".join(sorted(peers.MISSING)))
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    for path in report.write(results, machine.describe(), command, options.out):
        print("written:", path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
