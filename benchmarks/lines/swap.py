"""A program as it is for torch's RPC, and the same program with only its import swapped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.harness import Alternative, Line
from benchmarks.lines.places import Places
from mmrpc.testing import free_port

MODULES = {"mmrpc": "mmrpc.rpc", "plain torch RPC": "torch.distributed.rpc"}


class Program:
    """Two processes of `benchmarks.program`; they are stopped while they are not measured.

    An idle process of torch's own transport polls, and would spoil what is measured beside it.
    """

    def __init__(self, module: str) -> None:
        env = {
            **os.environ,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "PYTHONWARNINGS": "ignore",  # torch's own, at every start
        }
        # A stopped process would outlive a benchmark that was killed.
        with_parent = ["setpriv", "--pdeathsig", "KILL"]
        command = [*with_parent, sys.executable, "-m", "benchmarks.program", module]
        pipe = subprocess.PIPE
        self.asked = subprocess.Popen([*command, "1"], env=env)
        self.asks = subprocess.Popen(
            [*command, "0"], env=env, stdin=pipe, stdout=pipe, text=True, bufsize=1
        )
        self._answer()
        self.pause()

    @property
    def pids(self) -> list[int]:
        return [self.asks.pid, self.asked.pid]

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def exchange(self, mib: float) -> None:
        """Has the program send and get a tensor."""
        assert self.asks.stdin
        self.asks.stdin.write(f"{mib}\n")
        self._answer()

    def _answer(self) -> None:
        assert self.asks.stdout
        if not self.asks.stdout.readline():
            raise RuntimeError(f"the program ended with code {self.asks.wait()}")

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def close(self) -> None:
        """Lets the program end, or ends it."""
        assert self.asks.stdin
        self.resume()
        self.asks.stdin.close()
        for process in (self.asks, self.asked):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def lines(places: Places) -> Iterator[Line]:
    """Lines of exchanging tensors with another process, and of doing nothing."""
    with contextlib.ExitStack() as stack:
        programs = {}
        for name, module in MODULES.items():
            programs[name] = Program(module)
            stack.callback(programs[name].close)
        pids = [pid for program in programs.values() for pid in program.pids]

        def ways(do: Callable[[Program], object]) -> dict[str, Alternative | Callable[[], object]]:
            return {
                name: Alternative(lambda p=program: do(p), program.resume, program.pause)
                for name, program in programs.items()
            }

        for size, mib in (("1 KiB", 2**-10), ("16 MiB", 16), ("64 MiB", 64), ("256 MiB", 256)):
            if mib == 256 and places.quick:
                continue
            yield Line(
                f"only the import swapped: {size} sent, {size} back",
                ways(lambda program: program.exchange(mib)),  # noqa: B023
                calls=100 if mib < 1 else 2,
                pids=pids,
            )
        seconds = 0.25 if places.quick else 1.0
        yield Line(
            f"CPU of two idle RPC processes in {seconds:g} s",
            ways(lambda program: time.sleep(seconds)),
            pids=pids,
            of_cpu=True,
        )
