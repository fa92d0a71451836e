"""The coordinator alone: messages in, messages out, and how many of them."""

from __future__ import annotations

import pytest

from mmrpc.config import parse_config
from mmrpc.rpc.handshake.coordinator import MOST_PROBLEMS, Coordinator
from mmrpc.rpc.handshake.judge import own_version
from mmrpc.rpc.handshake.messages import (
    Expired,
    Hello,
    Nonce,
    Probed,
    ProbeTask,
    Read,
    ReadTask,
    Verdict,
    WriteTask,
    Wrote,
)
from mmrpc.rpc.handshake.report import FileMark, MountReport, Problem


def cluster(nodes, access="write"):
    return parse_config(
        {
            "nodes": {f"n{i}": {"mounts": {"data": f"/mnt/{i}"}} for i in range(nodes)},
            "mounts": {"data": {"access": access}},
        }
    )


def hello(rank, node=None, *, world_size=3, **changes):
    fields = {
        "rank": rank,
        "worker": f"w{rank}",
        "node": node or f"n{rank}",
        "host": f"h{node or rank}",
        "network": "one",
        "pid": 100 + rank,
        "address": "10.0.0.1",
        "world_size": world_size,
        "config": "hash",
        "sections": {"rpc": "x"},
        "mmrpc": own_version(),
        "torch": "2",
        "python": "3.11.7",
    }
    return Hello(**{**fields, **changes})


def report(i, **changes):
    fields = {"mount": "data", "node": f"n{i}", "path": f"/mnt/{i}", "readable": True}
    return MountReport(**{**fields, "writable": True, "root": f"r{i}", **changes})


class Ranks:
    """Answers every task as a rank on a good node would, and counts what goes to and fro."""

    def __init__(self, count, access="write", **reports):
        self.coordinator = Coordinator(cluster(count, access), "hash", {"rpc": "x"}, count)
        self.count = count
        self.reports = reports
        self.sent = dict.fromkeys(range(count), 0)
        self.bytes = dict.fromkeys(range(count), 0)

    def run(self):
        queue = [hello(rank, world_size=self.count) for rank in range(self.count)]
        while queue:
            message = queue.pop(0)
            for rank, task in self.coordinator.receive(message):
                self.sent[rank] += 1
                self.bytes[rank] += len(task.model_dump_json())
                answer = self.answer(rank, task)
                if answer is not None:
                    queue.append(answer)
        return self.coordinator.verdict

    def answer(self, rank, task):
        match task:
            case ProbeTask():
                return Probed(rank=rank, mounts=(report(rank, **self.reports),))
            case WriteTask():
                [name] = task.mounts
                nonce = Nonce(
                    mount=name,
                    name="x",
                    text="t",
                    writer=f"n{rank}",
                    path=f"/mnt/{rank}",
                    mark=FileMark(inode=7, generation="aa"),
                )
                return Wrote(rank=rank, nonces=(nonce,))
            case ReadTask():
                return Read(rank=rank, marks={"data": FileMark(inode=7, generation="bb")})
        return None


def test_one_node_writes_and_all_others_read():
    """The node of the lowest rank writes; inodes that agree are comparable, handles may not be."""
    ranks = Ranks(4)
    verdict = ranks.run()
    assert not verdict.problems
    [proven] = verdict.proven
    assert (proven.proof, proven.inode_comparable, proven.generation_comparable) == (
        "nonce",
        True,
        False,
    )
    # Probe, verdict, and write or read.
    assert set(ranks.sent.values()) == {3}


def test_work_of_a_node_does_not_grow():
    """Each rank is told as many messages and bytes in a cluster of 200 as in one of 4."""
    small, large = Ranks(4), Ranks(200)
    small.run()
    large.run()
    assert set(small.sent.values()) == set(large.sent.values())
    # Names and counts have more digits; nothing else differs.
    assert max(large.bytes.values()) < 1.1 * max(small.bytes.values())


def test_a_verdict_stays_small():
    """However many nodes fail, the verdict tells some and counts all."""
    problem = Problem(reason="no such directory", mount="data", path="/x")
    verdict = Ranks(200, problem=problem).run()
    assert len(verdict.problems) == MOST_PROBLEMS
    assert verdict.problem_count == 200
    assert verdict.problems[3].rank == 3


def test_object_stores_are_known_by_content():
    """A remote mount that nobody writes, without an id, is proven by each reference's content."""
    verdict = Ranks(2, access="read", path="s3://b/x", writable=None, root="").run()
    assert [proven.proof for proven in verdict.proven] == ["content"]


def test_a_writable_object_store_is_proven_by_a_nonce():
    """Whether an object can be written is found out by writing one."""
    verdict = Ranks(2, access="write", path="s3://b/x", writable=None, root="").run()
    assert [proven.proof for proven in verdict.proven] == ["nonce"]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (hello(0, "n1"), "two processes have this rank: PID 100 .* and PID 100"),
        (hello(1, worker="w0"), "its name 'w0' is that of rank 0 too"),
        (hello(1, "n0", host="other"), "two hosts go by the name 'n0'"),
        (hello(7), "its rank is not below the world size, 3"),
        (hello(1, world_size=4), "it expects 4 workers, and rank 0 expects 3"),
        (hello(1, config="x", sections={"rpc": "y"}), "rpc differs"),
        (hello(1, config="x"), "the order differs"),
        (hello(1, mmrpc="0"), "it has mmrpc 0"),
        (hello(1, node="", problem=Problem(reason="no node")), "no node"),
    ],
)
def test_what_cannot_be_is_told_at_once(second, words):
    """The verdict does not wait for the other ranks, goes to all of them, and is final."""
    coordinator = Coordinator(cluster(3), "hash", {"rpc": "x"}, 3)
    assert coordinator.receive(hello(0)) == []
    told = coordinator.receive(second)
    assert [rank for rank, _ in told] == [0, 1, 2]
    [verdict] = {id(message): message for _, message in told}.values()
    assert isinstance(verdict, Verdict)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(verdict.problems[0].reason)
    assert coordinator.receive(hello(2)) == []


def test_loopback_is_refused_between_networks():
    """A node that would tell the others 127.0.1.1 is named, unless all are in one network."""
    coordinator = Coordinator(cluster(2), "hash", {}, 2)
    coordinator.receive(hello(0, sections={}, world_size=2))
    coordinator.receive(hello(1, sections={}, world_size=2, network="two", address="127.0.1.1"))
    [problem] = coordinator.verdict.problems
    assert (problem.rank, problem.node) == (1, "n1")
    assert "127.0.1.1" in problem.reason
    assert "nodes.n1.interface" in problem.hint
    together = Coordinator(cluster(2), "hash", {}, 2)
    together.receive(hello(0, sections={}, world_size=2, address="127.0.0.1"))
    told = together.receive(hello(1, sections={}, world_size=2, address="127.0.0.1"))
    assert together.verdict is None
    assert [rank for rank, _ in told] == [0, 1]


def test_only_the_first_rank_of_a_node_looks():
    """Three ranks of one node cost one probe."""
    coordinator = Coordinator(cluster(1), "hash", {}, 3)
    told = [coordinator.receive(hello(rank, "n0", sections={})) for rank in (2, 1, 0)]
    assert told[:2] == [[], []]
    assert [rank for rank, _ in told[2]] == [0]


def test_absent_ranks_are_named_with_their_workers():
    """With roles in the config, who is absent has a name and a node."""
    config = parse_config(
        {
            "nodes": {"a": {}, "b": {}},
            "roles": {"ps": {"target": "m:f", "workers": {"a": 1, "b": 1}}},
        }
    )
    coordinator = Coordinator(config, "hash", {}, 2)
    coordinator.receive(hello(0, "a", sections={}, world_size=2))
    coordinator.receive(Expired())
    [problem] = coordinator.verdict.problems
    assert (problem.rank, problem.node) == (1, "b")
    assert problem.reason.startswith("ps1 did not come within rpc.handshake_timeout_s, 60 s")


def test_a_writer_that_fails_ends_it():
    """If the nonce cannot be written after all, that node's problem is the verdict."""
    ranks = Ranks(2)
    ranks.answer_before = ranks.answer

    def answer(rank, task):
        if isinstance(task, WriteTask):
            return Wrote(rank=rank, problems=(Problem(reason="disk full", node="n0"),))
        return ranks.answer_before(rank, task)

    ranks.answer = answer
    assert [problem.reason for problem in ranks.run().problems] == ["disk full"]
