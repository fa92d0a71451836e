"""The handshake between processes, some of them with views of the file system of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.distributed.handshaking import Meeting, wait_for
from tests.needs import needs, program


def config(roots, access="write", **rpc):
    return {
        "nodes": {node: {"mounts": {"data": str(root)}} for node, root in roots.items()},
        "mounts": {"data": {"access": access}},
        "rpc": rpc,
    }


@pytest.fixture
def places(tmp_path):
    """Directories: one that is shared, another, and two empty ones to mount at."""
    found = {name: tmp_path / name for name in ("shared", "another", "mnt", "srv")}
    for path in found.values():
        path.mkdir()
    return found


def same_error(outcomes):
    """The one error that all ranks told."""
    first, *others = outcomes
    assert all(other == first for other in others)
    assert first["error"] == "HandshakeError"
    return first


@needs("namespaces")
def test_hosts_with_other_mount_points_share_a_tensor(places):
    """A tensor in a mount is opened by another host at its own path, and writes are seen."""
    roots = {"a": places["mnt"], "b": places["srv"]}
    with Meeting(config(roots), 2) as meeting:
        for rank, node in enumerate("ab"):
            binds = {str(places["shared"]): str(roots[node])}
            meeting.start(rank, node, binds=binds, talk=True)
        first, second = (told["answer"] for told in meeting.outcomes())
    matrix = [["a", "nonce"], ["b", "nonce"]]
    assert second == matrix
    assert first == [*matrix, f"{places['srv']}/x", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
    assert os.listdir(places["shared"]) == ["x"]


@needs("namespaces")
def test_another_directory_at_the_same_path_is_refused(places):
    """The same path on two hosts is no proof: every rank tells which host has another directory."""
    root = places["mnt"]
    with Meeting(config({"a": root, "b": root}), 2) as meeting:
        meeting.start(0, "a", binds={str(places["shared"]): str(root)})
        meeting.start(1, "b", binds={str(places["another"]): str(root)})
        error = same_error(meeting.outcomes())
    assert (error["rank"], error["node"], error["mount"], error["path"]) == (
        1,
        "b",
        "data",
        str(root),
    )
    assert "this is not the directory that a has" in error["text"]
    assert os.listdir(places["shared"]) == os.listdir(places["another"]) == []


@needs("namespaces")
def test_a_host_that_cannot_write_is_named(places):
    """A read-only mount on one host is told by every rank if the config has access: write."""
    root = places["mnt"]
    with Meeting(config({"a": root, "b": root}), 2) as meeting:
        binds = {str(places["shared"]): str(root)}
        meeting.start(0, "a", binds=binds)
        meeting.start(1, "b", binds=binds, read_only=[str(root)])
        error = same_error(meeting.outcomes())
    assert (error["rank"], error["node"]) == (1, "b")
    assert "read-only file system" in error["text"]


@needs("namespaces")
def test_hosts_that_may_only_read_need_an_id_file(places):
    """Where nobody may write, nothing is proven without an id file; with one, all is well."""
    root = places["mnt"]

    def meet():
        with Meeting(config({"a": root, "b": root}, "read"), 2) as meeting:
            for rank, node in enumerate("ab"):
                binds = {str(places["shared"]): str(root)}
                meeting.start(rank, node, binds=binds, read_only=[str(root)])
            return meeting.outcomes()

    assert "nothing shows that it is the same on a, b" in same_error(meet())["text"]
    (places["shared"] / ".mmrpc-mount").write_text("0123456789abcdef")
    for told in meet():
        [proven] = told["verdict"]["proven"]
        assert (proven["proof"], proven["inode_comparable"]) == ("id-file", True)


def test_an_absent_rank_is_named_at_the_deadline(places):
    """Those who came tell who did not, soon after the deadline."""
    roots = {"a": places["shared"], "b": places["shared"]}
    rpc = {"handshake_timeout_s": 6, "mount_timeout_s": 3}
    with Meeting(config(roots, **rpc), 3) as meeting:
        meeting.start(0, "a")
        meeting.start(1, "b")
        error = same_error(meeting.outcomes())
    assert error["rank"] == 2
    assert "did not come within rpc.handshake_timeout_s, 6 s" in error["text"]


def test_an_absent_master_is_named(places):
    """Without rank 0 there is nobody to meet: the others say where they looked."""
    rpc = {"handshake_timeout_s": 3, "mount_timeout_s": 1}
    with Meeting(config({"a": places["shared"]}, **rpc), 2) as meeting:
        meeting.start(1, "a")
        [told] = meeting.outcomes()
    assert (told["error"], told["rank"]) == ("HandshakeError", 0)
    assert f"cannot reach rank 0 at 127.0.0.1:{meeting.port}" in told["text"]


def test_an_unknown_node_is_told_at_once(places):
    """A node that is not in the config ends the handshake for all, long before the deadline."""
    with Meeting(config({"a": places["shared"]}, handshake_timeout_s=600), 3) as meeting:
        meeting.start(0, "a")
        meeting.start(1, "aa")
        told = meeting.outcomes()
    assert {t["error"] for t in told} <= {"HandshakeError", "ConfigError"}
    for text in (t["text"] for t in told):
        assert "there is no node 'aa' (known: a); did you mean 'a'?" in text


@needs("namespaces")
def test_two_hosts_of_one_name_are_told_at_once(places):
    """Two hosts that were started as the same node end the handshake for all."""
    roots = {"a": places["shared"]}
    with Meeting(config(roots, handshake_timeout_s=600), 3) as meeting:
        meeting.start(0, "a")
        meeting.start(1, "a", binds={})
        error = same_error(meeting.outcomes())
    assert "two hosts go by the name 'a'" in error["text"]


def test_a_killed_handshake_is_told_and_swept(places):
    """If rank 0 is killed, the others say so; the next handshake removes what it left."""
    shared = places["shared"]
    roots = {"a": shared, "b": shared}
    rpc = {"mount_timeout_s": 3}
    with Meeting(config(roots, **rpc), 2) as meeting:
        first = meeting.start(0, "a")
        meeting.start(1, "b", stall="read")
        [left] = wait_for(lambda: os.listdir(shared), "nonce")
        first.kill()
        told = meeting.ranks[1].result()
    assert (told["error"], told["rank"]) == ("HandshakeError", 0)
    assert "lost the rendezvous" in told["text"]
    assert os.listdir(shared) == [left]
    with Meeting(config(roots), 2) as meeting:
        meeting.start(0, "a")
        meeting.start(1, "b")
        assert all("verdict" in told for told in meeting.outcomes())
    assert os.listdir(shared) == []


@pytest.fixture
def dead_mount(tmp_path):
    """A mounted network file system whose server does not answer any more."""
    (tmp_path / "remote").mkdir()
    mounted = tmp_path / "dead"
    mounted.mkdir()
    pid_file = tmp_path / "pid"
    server = tmp_path / "server"
    sftp = next(
        path
        for path in ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server")
        if Path(path).exists()
    )
    server.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec {sftp}\n")
    server.chmod(0o755)
    command = [str(program("sshfs")), f"x:{tmp_path}/remote", str(mounted)]
    options = ["-f", "-o", f"ssh_command={server}"]
    sshfs = subprocess.Popen([*command, *options])
    try:
        wait_for(lambda: os.path.ismount(mounted), "mount")
        os.kill(int(pid_file.read_text()), signal.SIGSTOP)
        yield mounted
    finally:
        subprocess.run([str(program("umount")), "-l", str(mounted)], check=False)
        sshfs.kill()
        sshfs.wait()
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


@needs("sshfs", "root")
def test_a_mount_that_hangs_is_named_after_its_own_deadline(places, dead_mount):
    """A dead server costs one node its mount's deadline, and all ranks name node and mount."""
    roots = {"a": places["shared"], "b": dead_mount}
    with Meeting(config(roots, mount_timeout_s=3, handshake_timeout_s=600), 2) as meeting:
        meeting.start(0, "a")
        meeting.start(1, "b")
        error = same_error(meeting.outcomes())
    assert (error["rank"], error["node"], error["path"]) == (1, "b", str(dead_mount))
    assert "no answer within 3 s" in error["text"]
