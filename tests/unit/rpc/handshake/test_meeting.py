"""Whole handshakes in one process: what is proven, what is refused, and what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from mmrpc.config import parse_config
from mmrpc.errors import HandshakeError
from mmrpc.rpc.handshake import nonce
from mmrpc.rpc.handshake.joining import raise_for
from mmrpc.rpc.handshake.report import Problem
from mmrpc.rpc.handshake.tasks import NodeTasks
from tests.unit.rpc.handshake.meeting import meet, probe_in_thread


def cluster(roots, access="write", rpc=None, **mount):
    """A cluster with one mount; ``roots`` says where it is on each node."""
    return parse_config(
        {
            "nodes": {node: {"mounts": {"data": str(root)}} for node, root in roots.items()},
            "mounts": {"data": {"access": access, **mount}},
            "rpc": {
                "handshake_timeout_s": 20,
                "mount_timeout_s": 5,
                "visibility_timeout_s": 1,
                **(rpc or {}),
            },
        }
    )


@pytest.fixture
def shared(tmp_path):
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.fixture
def link(tmp_path, shared):
    """Another path of the same directory, as another node may have it."""
    path = tmp_path / "link"
    path.symlink_to(shared)
    return path


def test_one_directory_at_two_places_is_proven(shared, link):
    """A mount that is somewhere else on each node is proven by a nonce, which is gone after."""
    outcome = meet(cluster({"a": shared, "b": link}), ["a", "b", "b"])
    assert outcome.verdict.problems == ()
    [proven] = outcome.verdict.proven
    assert (proven.proof, proven.inode_comparable, proven.generation_comparable) == (
        "nonce",
        True,
        True,
    )
    for node, root in (("a", shared), ("b", link)):
        found = outcome.report.get("data", node)
        assert (found.path, found.readable, found.writable) == (str(root), True, True)
        assert (found.same_as_others, found.proof, found.problem) == (True, "nonce", None)
        assert found.free_bytes > 0
        assert found.reader is not None
    assert [(n.node, n.ranks) for n in outcome.report.nodes] == [("a", (0,)), ("b", (1, 2))]
    assert list(shared.iterdir()) == []


def test_two_directories_of_one_name_are_told_apart(tmp_path, shared):
    """A directory that looks the same and is another one is refused by every rank, and named."""
    other = tmp_path / "other"
    other.mkdir()
    outcome = meet(cluster({"a": shared, "b": other}), ["a", "b", "b"])
    [problem] = outcome.verdict.problems
    assert (problem.rank, problem.node, problem.mount, problem.path) == (1, "b", "data", str(other))
    assert "this is not the directory that a has" in problem.reason
    assert outcome.report.get("data", "b").same_as_others is False
    assert list(shared.iterdir()) == list(other.iterdir()) == []


def test_a_read_mount_is_proven_by_a_nonce_if_somebody_may_write(shared, link):
    """``access: read`` says what jobs do; who may write can still leave a proof."""
    outcome = meet(cluster({"a": shared, "b": link}, "read"), ["a", "b"])
    assert [proven.proof for proven in outcome.verdict.proven] == ["nonce"]


class ReadOnly(NodeTasks):
    """A node that may write nowhere, whoever runs the test."""

    def do(self, task, rank):
        answer = super().do(task, rank)
        if hasattr(answer, "mounts"):
            mounts = tuple(m.model_copy(update={"writable": False}) for m in answer.mounts)
            return answer.model_copy(update={"mounts": mounts})
        return answer


def read_only(cluster, node):
    return ReadOnly(cluster, node, probe_in_thread)


def test_without_a_writer_an_id_file_proves_it(tmp_path, shared, link):
    """Where nobody may write, nodes with the same id file are one; another id is refused."""
    other = tmp_path / "other"
    other.mkdir()
    config = cluster({"a": shared, "b": link}, "read")
    from mmrpc.paths.mounts import MountTable

    [mount] = MountTable.from_config(config, "a")
    text = nonce.write_id(mount, "a")
    assert nonce.write_id(mount, "a") == text
    outcome = meet(config, ["a", "b"], tasks=read_only)
    [proven] = outcome.verdict.proven
    assert (proven.proof, proven.inode_comparable) == ("id-file", True)
    wrong = cluster({"a": shared, "b": other}, "read")
    [problem] = meet(wrong, ["a", "b"], tasks=read_only).verdict.problems
    assert (problem.node, problem.path) == ("b", str(other))
    assert "has no .mmrpc-mount file" in problem.reason
    (other / nonce.ID_FILE).write_text("another")
    [problem] = meet(wrong, ["a", "b"], tasks=read_only).verdict.problems
    assert "has another .mmrpc-mount file" in problem.reason


def test_without_any_proof_it_is_refused(tmp_path, shared):
    """Two directories of one host that nobody may write and that have no id are not one."""
    other = tmp_path / "other"
    other.mkdir()
    outcome = meet(cluster({"a": shared, "b": other}, "read"), ["a", "b"], tasks=read_only)
    [problem] = outcome.verdict.problems
    assert "nothing shows that it is the same on a, b" in problem.reason
    assert "--write-id" in problem.hint


def test_one_directory_of_one_host_needs_no_proof(shared):
    """Nodes that are one host and have one path mean the same by it."""
    outcome = meet(cluster({"a": shared, "b": shared}, "read"), ["a", "b"], tasks=read_only)
    assert [proven.proof for proven in outcome.verdict.proven] == ["one-host"]


def test_what_is_declared_is_told_as_declared(tmp_path, shared):
    """``trust: declared`` is believed and never called proven."""
    other = tmp_path / "other"
    other.mkdir()
    config = cluster({"a": shared, "b": other}, "read", trust="declared")
    outcome = meet(config, ["a", "b"])
    assert [proven.proof for proven in outcome.verdict.proven] == ["declared"]
    assert outcome.report.get("data", "b").same_as_others is None


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_node_without_the_directory_is_named(tmp_path, shared, kind):
    """The verdict names rank, node, mount, path and cause."""
    absent = tmp_path / "absent"
    if kind == "file":
        absent.write_text("")
    outcome = meet(cluster({"a": shared, "b": absent}), ["a", "b"])
    [problem] = outcome.verdict.problems
    assert (problem.rank, problem.node, problem.mount, problem.path) == (
        1,
        "b",
        "data",
        str(absent),
    )
    assert ("no such directory" if kind == "missing" else "not a directory") in problem.reason
    with pytest.raises(HandshakeError, match=r"on b: rank 1: .*absent' \(mount 'data'\)") as caught:
        raise_for(outcome.verdict)
    error = caught.value
    assert (error.rank, error.node, error.mount, error.path) == (1, "b", "data", str(absent))
    assert outcome.report.get("data", "a").readable


def test_all_that_is_wrong_is_told(tmp_path, shared):
    """Several problems come in one error: the first as its own, the others as notes."""
    roots = {"a": shared, "b": tmp_path / "x", "c": tmp_path / "y"}
    outcome = meet(cluster(roots), ["a", "b", "c"])
    assert {problem.node for problem in outcome.verdict.problems} == {"b", "c"}
    with pytest.raises(HandshakeError) as caught:
        raise_for(outcome.verdict)
    assert len(caught.value.problems) == 2
    assert len(caught.value.__notes__) == 1


def test_the_line_of_the_config_is_told(tmp_path, shared):
    """The error says where in the file the path stands."""
    from mmrpc.config import load_config

    path = tmp_path / "c.yaml"
    path.write_text(
        f"nodes:\n  a:\n    mounts: {{data: {shared}}}\n  b:\n    mounts:\n"
        f"      data: {tmp_path}/nowhere\nmounts: {{data: {{access: write}}}}\n"
    )
    outcome = meet(load_config(path), ["a", "b"])
    assert outcome.verdict.problems[0].place == f"{path}:6:7"


def test_another_config_is_told_at_once(shared):
    """A rank with another config is named with the part that differs, and nobody waits for more."""
    configs = [cluster({"a": shared}), cluster({"a": shared}, rpc={"timeout_s": 3})]
    outcome = meet(configs, ["a", "a"], world_size=3)
    [problem] = outcome.verdict.problems
    assert (problem.rank, problem.node) == (1, "a")
    assert "its config is not that of rank 0: rpc differs" in problem.reason


def test_two_hosts_of_one_name_are_told_at_once(shared):
    """Two hosts that go by one node's name are an error, though more ranks are awaited."""
    outcome = meet(
        cluster({"a": shared}),
        ["a", "a"],
        world_size=3,
        change=lambda hello: hello.model_copy(update={"host": f"host{hello.rank}"}),
    )
    [problem] = outcome.verdict.problems
    assert "two hosts go by the name 'a'" in problem.reason


def test_a_rank_that_does_not_know_its_node_is_told_at_once(shared):
    """What keeps one rank from taking part is told to all."""

    def change(hello):
        if hello.rank != 1:
            return hello
        problem = Problem(reason="there is no node 'x'", rank=1)
        return hello.model_copy(update={"node": "", "problem": problem})

    outcome = meet(cluster({"a": shared}), ["a", "a"], world_size=9, change=change)
    assert [problem.reason for problem in outcome.verdict.problems] == ["there is no node 'x'"]


def test_an_absent_rank_is_named(shared):
    """At the deadline, the verdict names who has not come."""
    config = cluster(
        {"a": shared},
        rpc={"handshake_timeout_s": 0.5, "mount_timeout_s": 0.1, "visibility_timeout_s": 0},
    )
    outcome = meet(config, ["a", "a"], world_size=4)
    assert [problem.rank for problem in outcome.verdict.problems] == [2, 3]
    assert "did not come within rpc.handshake_timeout_s, 0.5 s" in (
        outcome.verdict.problems[0].reason
    )


def test_a_node_that_does_not_answer_is_named(shared, link):
    """A node whose tasks hang does not make the others hang: it is named at the deadline."""
    release = threading.Event()

    class Stuck(NodeTasks):
        def do(self, task, rank):
            if rank == 1:
                release.wait(30)
            return super().do(task, rank)

    config = cluster(
        {"a": shared, "b": link},
        rpc={"handshake_timeout_s": 1, "mount_timeout_s": 0.5, "visibility_timeout_s": 0},
    )

    def make(config, node):
        if node == "a":
            original = NodeTasks.close

            class Watching(NodeTasks):
                def close(self):
                    original(self)
                    release.set()

            return Watching(config, node, probe_in_thread)
        return Stuck(config, node, probe_in_thread)

    outcome = meet(config, ["a", "b"], tasks=make)
    [problem] = outcome.verdict.problems
    assert (problem.rank, problem.node) == (1, "b")
    assert "did not look at its mounts within" in problem.reason


def test_what_a_killed_handshake_left_is_swept(shared, link):
    """Nonces of dead processes are removed by the next handshake; others' files are not."""
    code = (
        "import sys; from mmrpc.paths.mounts import Mount; from mmrpc.rpc.handshake import nonce;"
        "nonce.write(Mount('data', sys.argv[1]), 'a'); import os; os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(shared)], timeout=60, check=False)
    [left] = os.listdir(shared)
    assert left.startswith(".mmrpc-nonce-")
    (shared / "mine").write_text("")
    meet(cluster({"a": shared, "b": link}), ["a", "b"])
    assert os.listdir(shared) == ["mine"]


def test_unlike_versions_are_told(shared):
    """Another torch is a warning; another mmrpc is refused."""

    def other_torch(hello):
        return hello.model_copy(update={"torch": f"2.{hello.rank}"})

    outcome = meet(cluster({"a": shared}), ["a", "a"], change=other_torch)
    [warning] = outcome.verdict.warnings
    assert "versions of torch differ: 2.0 on 1 ranks, first 0; 2.1 on 1 ranks" in warning

    def other_mmrpc(hello):
        return hello.model_copy(update={"mmrpc": "9"}) if hello.rank else hello

    [problem] = meet(cluster({"a": shared}), ["a", "a"], change=other_mmrpc).verdict.problems
    assert "it has mmrpc 9, and rank 0 has" in problem.reason


def test_what_cannot_be_read_ends_it(shared):
    """A message of a version that says too little ends the handshake at once, for all."""

    class Garbled:
        rank = 1

        def model_dump_json(self):
            return '{"kind": "hello", "rank": 1}'

    def change(hello):
        return Garbled() if hello.rank == 1 else hello

    outcome = meet(cluster({"a": shared}), ["a", "a", "a"], change=change)
    [problem] = outcome.verdict.problems
    assert "the coordinator failed (ValidationError" in problem.reason
    assert "same version of mmrpc" in problem.hint


def test_a_version_that_says_more_is_told_that_it_is_another(shared):
    """A message with unknown fields is read, so that the version can be told."""

    class Newer:
        rank = 1

        def __init__(self, hello):
            self.hello = hello

        def model_dump_json(self):
            return json.dumps({**self.hello.model_dump(), "mmrpc": "99", "new": 1})

    outcome = meet(
        cluster({"a": shared}),
        ["a", "a"],
        change=lambda hello: Newer(hello) if hello.rank else hello,
    )
    assert "it has mmrpc 99" in outcome.verdict.problems[0].reason


def test_nothing_to_prove_is_fine():
    """A cluster without mounts has a handshake all the same."""
    config = parse_config({"nodes": {"a": {}, "b": {}}})
    outcome = meet(config, ["a", "b"])
    assert outcome.verdict.problems == outcome.verdict.proven == ()
    assert outcome.verdict.present == 2
    assert outcome.verdict.is_one_host
