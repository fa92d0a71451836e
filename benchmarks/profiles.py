"""Where the time of the hottest operations goes: ``python -m benchmarks.profiles [NAME ...]``.

py-spy samples the processes while an operation runs again and again; it needs root, or a kernel
that lets it trace. Samples that wait, for a reply or for the GIL, are left out. The last column
has the CPU time of each kind of thread, which the kernel counts: the threads of TensorPipe run no
Python, so that py-spy does not see them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import mmrpc.rpc as rpc
from benchmarks import results, tables
from benchmarks.lines import train
from benchmarks.lines.callee import nothing
from benchmarks.lines.places import Places, places
from mmrpc import MemoryMappedTensor, save_tree
from mmrpc.data import MappedDataset
from mmrpc.testing import run_workers
from mmrpc.train import ParameterServer

RATE_HZ = 200
WAITS = re.compile(
    r"PyThread_acquire_lock_timed|take_gil|gil_scoped_acquire|PyEval_RestoreThread|cond_\w*wait"
    r"|^(poll|epoll_wait|select|sem_wait)\b|Future::wait|selectors\.py"
)
SYSTEM = re.compile(
    r"^(os_|_?_?(f?stat|statx|open|close|mmap|munmap|madvise|read|p?write|link|unlink|rename|mkdir"
    r"|fcntl|ftruncate|fallocate|syscall|name_to_handle)\w*\b)|posixmodule\.c"
)
OURS = re.compile(r"^(\S+) \(.*?mmrpc/(?!testing)(\S+)\.py:\d+\)$")
PYTHON = re.compile(r"^\S+ \((?:.*/site-packages/)?(\S+)\.py:\d+\)$")
NATIVE = {"libtorch": "torch", "libc10": "torch", "libgomp": "torch", "_pickle.c": "pickle"}


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        title: What it is called in the table.
        prepare: Makes the function that does it once, in worker 0; what has to be undone after
            it goes onto the stack.
        workers: Size of the RPC group. Native frames are sampled where there is none: to walk
            them stops a process for so long that calls between processes would be others. Where
            there is one, what holds the GIL is sampled.
        burst: How often it is done between two looks at whether the time is over.
        sides: What the profiled processes are called, from worker 0 on.
    """

    title: str
    prepare: Callable[[Places, contextlib.ExitStack], Callable[[], Any]]
    workers: int = 1
    sides: tuple[str, ...] = ("",)
    burst: int = 1


@dataclass
class Profile:
    """What was found of one process."""

    samples: collections.Counter[str] = field(default_factory=collections.Counter)
    threads_s: dict[str, float] = field(default_factory=dict)


def _call(where: Places, stack: contextlib.ExitStack) -> Callable[[], Any]:
    x = MemoryMappedTensor.zeros(1 << 20, filename=where.fresh(where.memory))
    return lambda: rpc.rpc_sync("worker1", nothing, (x,))


def _pickle(where: Places, stack: contextlib.ExitStack) -> Callable[[], Any]:
    view = MemoryMappedTensor.zeros(1000, 128, filename=where.fresh(where.disk))[1:][2:]
    return lambda: pickle.loads(pickle.dumps(view))


def _open(where: Places, stack: contextlib.ExitStack) -> Callable[[], Any]:
    path = where.fresh(where.disk)
    MemoryMappedTensor.zeros(256, filename=path)
    return lambda: MemoryMappedTensor.from_filename(path, torch.float32, (256,))


def _batch(where: Places, stack: contextlib.ExitStack) -> Callable[[], Any]:
    images = torch.randint(0, 255, (20_000, 3, 32, 32), dtype=torch.uint8)
    ds = MappedDataset.from_tensors(os.path.join(where.memory, "ds"), {"image": images})
    rows = torch.randint(0, len(images), (256,)).tolist()
    return lambda: ds.__getitems__(rows)


def _tree(where: Places, stack: contextlib.ExitStack) -> Callable[[], Any]:
    tensors = {f"layer{i}": torch.full((16,), float(i)) for i in range(2_000)}

    def run() -> None:
        directory = where.fresh(where.memory)
        rpc.rpc_sync("worker1", len, (save_tree(directory, tensors, arena=True),))
        os.unlink(os.path.join(directory, "tree.arena"))

    return run


def _step(where: Places, stack: contextlib.ExitStack) -> Callable[[], Any]:
    width = 1_000
    directory = os.path.join(where.memory, "ps")
    server = ParameterServer(train.model(width), train.sgd, directory, trainers=2, durable=False)
    stack.enter_context(server)
    train.Limit(width, where.memory)  # its files, which the trainers map as well
    train.everyone(train.join, width, where.memory)
    stack.callback(train.everyone, train.leave)
    return lambda: train.everyone(train.step_ours)


OPERATIONS = {
    "call": Operation("RPC with a mapped tensor", _call, 2, ("caller", "callee")),
    "pickle": Operation("pickle round trip of a view", _pickle, burst=1000),
    "open": Operation("open and close a file of 1 KiB", _open, burst=1000),
    "batch": Operation("a batch of 256 rows of 3x32x32 uint8", _batch, burst=1000),
    "step": Operation("parameter server, a step", _step, 3, ("server", "trainer")),
    "tree": Operation("publish 2,000 tensors and send them", _tree, 2, ("caller", "callee")),
}


def profile(name: str, seconds: int, where: Places) -> list[Profile]:
    """Profiles an operation; a profile for each of its sides."""
    operation = OPERATIONS[name]
    found: list[Profile] = run_workers(
        _work, operation.workers, name, seconds, where, timeout_s=120
    )[0]
    return found


def _work(rank: int, name: str, seconds: int, where: Places) -> list[Profile] | None:
    if rank:
        return None
    with contextlib.ExitStack() as stack:
        operation = OPERATIONS[name]
        return _sampled(operation, operation.prepare(where, stack), seconds)


def _sampled(operation: Operation, run: Callable[[], Any], seconds: int) -> list[Profile]:
    pids = [os.getpid()]
    pids += [rpc.rpc_sync(f"worker{i}", os.getpid) for i in range(1, len(operation.sides))]
    for _ in range(20):
        run()
    before = [_threads_s(pid) for pid in pids]
    with tempfile.TemporaryDirectory() as directory:
        paths = [os.path.join(directory, str(pid)) for pid in pids]
        native = ["--native"] if operation.workers == 1 else ["--gil"]
        spies = [_spy(pid, seconds, path, native) for pid, path in zip(pids, paths, strict=True)]
        while any(spy.poll() is None for spy in spies):
            for _ in range(operation.burst):
                run()
        if any(spy.returncode for spy in spies):
            raise RuntimeError("py-spy failed: is it allowed to trace this process?")
        samples = [count(Path(path).read_text().splitlines()) for path in paths]
    # The sampling stops the processes, but takes none of their CPU time.
    threads = [_difference(_threads_s(pid), old) for pid, old in zip(pids, before, strict=True)]
    return [Profile(*pair) for pair in zip(samples, threads, strict=True)]


def _spy(pid: int, seconds: int, path: str, more: list[str]) -> subprocess.Popen[bytes]:
    command = [
        os.path.join(os.path.dirname(sys.executable), "py-spy"),
        *("record", "--format", "raw", "--rate", str(RATE_HZ), *more),
        *("--duration", str(seconds), "--pid", str(pid), "--output", path),
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _threads_s(pid: int) -> dict[str, float]:
    """CPU seconds of the threads of a process, by kind."""
    found: dict[str, float] = collections.defaultdict(float)
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        kind = "TensorPipe" if name.startswith("TP_") else "torch's pool" if "pt_" in name else ""
        found[kind or "Python's threads"] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return dict(found)


def _difference(new: dict[str, float], old: dict[str, float]) -> dict[str, float]:
    return {name: value - old.get(name, 0.0) for name, value in new.items()}


def count(stacks: Iterable[str]) -> collections.Counter[str]:
    """Samples by where they were, from py-spy's raw form: frames from the root, and a number."""
    found: collections.Counter[str] = collections.Counter()
    for line in stacks:
        frames, _, number = line.rpartition(" ")
        if label := where_of(frames.split(";")):
            found[label] += int(number)
    return found


def where_of(frames: list[str]) -> str:
    """A name for where a stack is, or an empty one if it waits."""
    named = [frame for frame in frames if not frame.startswith("0x")]
    ours = next((m for frame in reversed(named) if (m := OURS.match(frame))), None)
    if any(WAITS.search(frame) for frame in named[-4:]):
        return ""
    if named and SYSTEM.search(named[-1]):
        return "system calls"
    for library, label in NATIVE.items():
        if named and library in named[-1]:
            return label
    if ours:
        return f"{ours[2].replace('/', '.')}.{ours[1]}"
    innermost = next((m for frame in reversed(named) if (m := PYTHON.match(frame))), None)
    if innermost is None:
        return "Python"
    if innermost[1].startswith(("benchmarks/", "mmrpc/testing")):
        return "the loop"
    return innermost[1].removesuffix("/__init__").replace("/", ".")


def _shares(parts: dict[str, Any], most: int = 7) -> str:
    total = sum(parts.values()) or 1
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    cells = [f"{name} {value / total:.0%}" for name, value in ordered if value / total >= 0.03]
    return ", ".join(cells[:most])


def text(found: dict[str, list[Profile]]) -> str:
    """The table of the profiles."""
    rows = []
    for name, profiles in found.items():
        operation = OPERATIONS[name]
        for side, one in zip(operation.sides, profiles, strict=True):
            title = f"{operation.title}, {side}" if side else operation.title
            threads = _shares(one.threads_s) if operation.workers > 1 else ""
            samples = f"{sum(one.samples.values()):,}"
            rows.append((title, samples, _shares(one.samples), threads))
    return tables.table(("operation", "samples", "where it runs", "CPU by kind of thread"), rows)


def main() -> int:
    """Profiles, prints, and writes the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(OPERATIONS)}")
    parser.add_argument("--seconds", type=int, default=8, help="of each (8)")
    parser.add_argument("--out", default="benchmarks/results/full", help="where the table goes")
    options = parser.parse_args()
    found = {}
    for name in options.names or OPERATIONS:
        with places(quick=True) as where:
            found[name] = profile(name, options.seconds, where)
    table = text(found)
    print(table)
    results.write(options.out, "profiles", {"text": table})
    return 0


if __name__ == "__main__":
    sys.exit(main())
