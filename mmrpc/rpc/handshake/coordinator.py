"""The one who hears all ranks and gives the verdict: what was told in, what to tell out, no I/O.

Its work grows linearly with the ranks. Each node's first rank looks at the node's mounts; then
one node per mount writes a nonce, and the first ranks of the others read it.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from mmrpc.rpc.handshake import judge
from mmrpc.rpc.handshake.messages import (
    Expired,
    Hello,
    Probed,
    ProbeTask,
    Proven,
    Read,
    ReadTask,
    Verdict,
    WriteTask,
    Wrote,
)
from mmrpc.rpc.handshake.report import NodeReport, PathReport, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mmrpc.config import ClusterConfig
    from mmrpc.rpc.handshake.messages import Nonce, ToCoordinator, ToRank
    from mmrpc.rpc.handshake.report import FileMark, MountReport

MOST_PROBLEMS = 20
"""How many problems a verdict tells; a cluster where all fails has as many as nodes."""


class Coordinator:
    """Hears all ranks of one handshake.

    Args:
        cluster: The config that all should have.
        config: Its hash.
        sections: The hashes of its parts.
        world_size: How many ranks there should be.

    Attributes:
        verdict: How it ended; None while it has not.
        report: What is known of nodes and mounts; complete once there is a verdict.
    """

    def __init__(
        self, cluster: ClusterConfig, config: str, sections: dict[str, str], world_size: int
    ) -> None:
        self.verdict: Verdict | None = None
        self.report = PathReport()
        self._cluster = cluster
        self._config = config
        self._sections = sections
        self._world_size = world_size
        self._hellos: dict[int, Hello] = {}
        self._workers: dict[str, int] = {}
        self._hosts: dict[str, Hello] = {}
        self._probers: dict[str, int] = {}
        self._waiting: dict[int, str] = {}
        self._mounts: dict[tuple[str, str], MountReport] = {}
        self._nonces: dict[str, Nonce] = {}
        self._marks: dict[str, dict[str, FileMark]] = {}
        self._proven: dict[str, Proven] = {}
        self._problems: list[Problem] = []
        self._doing = "come"

    def receive(self, message: ToCoordinator) -> list[tuple[int, ToRank]]:
        """Takes one message, and gives those that follow from it, with their ranks."""
        if self.verdict is not None:
            return []
        match message:
            case Hello():
                return self._on_hello(message)
            case Probed():
                return self._on_probed(message)
            case Wrote():
                return self._on_wrote(message)
            case Read():
                return self._on_read(message)
            case Expired():
                return self._on_expired()

    def fail(self, reason: str) -> list[tuple[int, ToRank]]:
        """Ends the handshake for a reason of the coordinator's own."""
        self._problems.append(
            Problem(reason=reason, rank=0, hint="Has every node the same version of mmrpc?")
        )
        return self._finish()

    def _on_hello(self, hello: Hello) -> list[tuple[int, ToRank]]:
        self._problems += self._check_hello(hello)
        self._hellos.setdefault(hello.rank, hello)
        self._workers.setdefault(hello.worker, hello.rank)
        self._hosts.setdefault(hello.node, hello)
        if self._problems:
            # At once: who came with another config, or as another, would only be waited for.
            return self._finish()
        if len(self._hellos) < self._world_size:
            return []
        self._problems += self._check_addresses()
        if self._problems:
            return self._finish()
        for rank in sorted(self._hellos):
            self._probers.setdefault(self._hellos[rank].node, rank)
        self._doing = "look at its mounts"
        return self._ask({rank: ProbeTask() for rank in self._probers.values()})

    def _check_hello(self, hello: Hello) -> Iterable[Problem]:
        def problem(reason: str, hint: str) -> Problem:
            return Problem(reason=reason, hint=hint, rank=hello.rank, node=hello.node or None)

        if hello.problem is not None:
            yield hello.problem
        if hello.world_size != self._world_size:
            yield problem(
                f"it expects {hello.world_size} workers, and rank 0 expects {self._world_size}",
                "Start all processes with the same world size.",
            )
        elif not 0 <= hello.rank < self._world_size:
            yield problem(
                f"its rank is not below the world size, {self._world_size}",
                "Start all processes with the same world size.",
            )
        other = self._hellos.get(hello.rank)
        if other is not None:
            yield problem(
                f"two processes have this rank: {_who(other)} and {_who(hello)}",
                "Was one node started twice, or do two nodes go by one name?",
            )
        elif hello.worker in self._workers:
            yield problem(
                f"its name {hello.worker!r} is that of rank {self._workers[hello.worker]} too",
                "Give each worker a name of its own.",
            )
        first = self._hosts.get(hello.node)
        if first is not None and hello.node and first.host != hello.host:
            yield problem(
                f"two hosts go by the name {hello.node!r}: {_who(first)} and {_who(hello)}",
                "Give each host its own name with --node or MMRPC_NODE.",
            )
        if hello.config != self._config:
            parts = [
                name
                for name in {**self._sections, **hello.sections}
                if self._sections.get(name) != hello.sections.get(name)
            ]
            yield problem(
                f"its config is not that of rank 0: {', '.join(parts) or 'the order'} differs",
                "Give all nodes the same file and the same --set.",
            )
        ours = judge.own_version()
        if hello.mmrpc != ours:
            yield problem(
                f"it has mmrpc {hello.mmrpc}, and rank 0 has {ours}",
                "Install the same version on all nodes.",
            )

    def _check_addresses(self) -> Iterable[Problem]:
        if len({hello.network for hello in self._hellos.values()}) < 2:
            return
        for node, hello in self._hosts.items():
            if ipaddress.ip_address(hello.address.partition("%")[0]).is_loopback:
                yield Problem(
                    reason=f"RPC would tell the others to reach it at {hello.address}, where each "
                    "finds only itself",
                    hint=f"Set nodes.{node}.interface, or mend /etc/hosts there.",
                    rank=hello.rank,
                    node=node,
                )

    def _ask(self, tasks: dict[int, ToRank]) -> list[tuple[int, ToRank]]:
        self._waiting = {rank: self._hellos[rank].node for rank in tasks}
        return list(tasks.items())

    def _on_probed(self, message: Probed) -> list[tuple[int, ToRank]]:
        self._waiting.pop(message.rank, None)
        for report in message.mounts:
            self._mounts[report.mount, report.node] = report
            if report.problem is not None:
                problem = report.problem.model_copy(update={"rank": message.rank})
                self._problems.append(problem)
        if self._waiting:
            return []
        if self._problems:
            return self._finish()
        return self._start_proofs()

    def _start_proofs(self) -> list[tuple[int, ToRank]]:
        hosts = {node: hello.host for node, hello in self._hosts.items()}
        writers: dict[int, list[str]] = {}
        for name, config in self._cluster.mounts.items():
            # In order of rank, so that the first one that can is the same each time.
            reports = [
                self._mounts[name, node] for node in self._probers if (name, node) in self._mounts
            ]
            found = judge.choose(name, config, reports, hosts, self._cluster)
            if isinstance(found, Proven):
                self._proven[name] = found
            elif isinstance(found, Problem):
                self._problems.append(found)
            elif found is not None:
                writers.setdefault(self._probers[found], []).append(name)
        if self._problems or not writers:
            return self._finish()
        self._doing = "write a file for the others to read"
        return self._ask({rank: WriteTask(mounts=tuple(names)) for rank, names in writers.items()})

    def _on_wrote(self, message: Wrote) -> list[tuple[int, ToRank]]:
        self._waiting.pop(message.rank, None)
        self._take_problems(message.rank, message.problems)
        self._nonces |= {nonce.mount: nonce for nonce in message.nonces}
        if self._waiting:
            return []
        if self._problems:
            return self._finish()
        tasks: dict[int, ToRank] = {}
        for node, rank in self._probers.items():
            nonces = tuple(
                nonce
                for name, nonce in self._nonces.items()
                if nonce.writer != node and (name, node) in self._mounts
            )
            if nonces:
                tasks[rank] = ReadTask(nonces=nonces)
        self._doing = "read the files that others wrote"
        return self._ask(tasks)

    def _on_read(self, message: Read) -> list[tuple[int, ToRank]]:
        self._waiting.pop(message.rank, None)
        self._take_problems(message.rank, message.problems)
        for name, mark in message.marks.items():
            self._marks.setdefault(name, {})[self._hellos[message.rank].node] = mark
        if self._waiting:
            return []
        for name, nonce in self._nonces.items():
            marks = [nonce.mark, *self._marks.get(name, {}).values()]
            self._proven[name] = judge.compare(name, "nonce", marks)
        return self._finish()

    def _take_problems(self, rank: int, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self._problems.append(problem.model_copy(update={"rank": rank}))
            key = (problem.mount or "", problem.node or "")
            if key in self._mounts:
                update = {"problem": problem, "same_as_others": False}
                self._mounts[key] = self._mounts[key].model_copy(update=update)

    def _on_expired(self) -> list[tuple[int, ToRank]]:
        within = f"within rpc.handshake_timeout_s, {self._cluster.rpc.handshake_timeout_s:g} s"
        expected = {worker.rank: worker for worker in self._cluster.workers()}
        if self._doing == "come":
            for rank in range(self._world_size):
                if rank not in self._hellos:
                    worker = expected.get(rank)
                    self._problems.append(
                        Problem(
                            reason=(f"{worker.name} " if worker else "it ")
                            + f"did not come {within}",
                            hint="Look at its log, and whether its node can reach the master.",
                            rank=rank,
                            node=worker.node if worker else None,
                        )
                    )
        for rank, node in self._waiting.items():
            self._problems.append(
                Problem(
                    reason=f"it did not {self._doing} {within}",
                    hint="Look at its log.",
                    rank=rank,
                    node=node,
                )
            )
        return self._finish()

    def _finish(self) -> list[tuple[int, ToRank]]:
        problems = self._problems
        warnings = tuple(judge.warnings(self._hellos.values(), self._cluster))
        first = self._hellos.get(0)
        self.verdict = Verdict(
            problems=tuple(problems[:MOST_PROBLEMS]),
            problem_count=len(problems),
            proven=() if problems else tuple(self._proven.values()),
            warnings=warnings[:MOST_PROBLEMS],
            present=len(self._hellos),
            coordinator=first.worker if first else "",
            is_one_host=len({hello.host for hello in self._hellos.values()}) == 1,
        )
        self.report = PathReport(
            nodes=tuple(self._node_reports()),
            mounts=tuple(self._mount_reports()),
            warnings=warnings,
        )
        # Also to those who are not there: a late one shall hear how it ended.
        return [(rank, self.verdict) for rank in range(self._world_size)]

    def _node_reports(self) -> Iterable[NodeReport]:
        ranks: dict[str, list[int]] = {}
        for rank in sorted(self._hellos):
            ranks.setdefault(self._hellos[rank].node, []).append(rank)
        for node, its_ranks in ranks.items():
            hello = self._hellos[its_ranks[0]]
            yield NodeReport(
                node=node,
                host=hello.host,
                address=hello.address,
                ranks=tuple(its_ranks),
                mmrpc=hello.mmrpc,
                torch=hello.torch,
                python=hello.python,
            )

    def _mount_reports(self) -> Iterable[MountReport]:
        for name in self._cluster.mounts:
            for node in self._probers:
                report = self._mounts.get((name, node))
                proven = self._proven.get(name)
                if report is None:
                    continue
                if proven is None:
                    yield report
                    continue
                shown = proven.proof in ("nonce", "id-file", "one-host")
                yield report.model_copy(
                    update={
                        "proof": proven.proof,
                        "same_as_others": False if report.problem else (True if shown else None),
                        "inode_comparable": proven.inode_comparable,
                        "generation_comparable": proven.generation_comparable,
                    }
                )


def _who(hello: Hello) -> str:
    return f"PID {hello.pid} at {hello.address} ({hello.worker} on {hello.node or '?'})"
