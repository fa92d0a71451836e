"""Which host and process it is, in terms that others can compare."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrpc.core.system import host
from tests.needs import needs
from tests.peers import Peer


def ids() -> tuple[str, str]:
    return host.host_id(), host.memory_host_id()


def test_processes_of_one_host_agree(peer: Peer) -> None:
    """Two processes in the same namespaces have the same ids."""
    assert peer.call(ids) == ids()
    assert [len(part) for part in ids()] == [16, 16]


@needs("namespaces")
@pytest.mark.parametrize(("option", "same"), [("--mount", [False, True]), ("--pid", [True, False])])
def test_namespaces_differ(option: str, same: list[bool]) -> None:
    """Another mount namespace is another host for files, another PID namespace one for memory."""
    code = "from mmrpc.core.system import host; print(host.host_id(), host.memory_host_id())"
    done = subprocess.run(
        ["unshare", option, "--fork", "--mount-proc", sys.executable, "-c", code]
        if option == "--pid"
        else ["unshare", option, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found = done.stdout.split()
    if option == "--pid":  # which takes a mount namespace of its own for /proc
        assert found[1] != ids()[1]
    else:
        assert [a == b for a, b in zip(found, ids(), strict=True)] == same


def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not tell, no other process is taken to be on this host."""

    def fail(*_: object) -> str:
        raise OSError

    before = ids()
    with monkeypatch.context() as patched:
        patched.setattr(os, "readlink", fail)
        host._forget()
        alone = ids()
    host._forget()
    assert ids() == before
    assert set(alone).isdisjoint(before)


def test_alive(peer: Peer) -> None:
    """A process is known by its start time, which another with its PID would not have."""
    mine = host.own_start_time()
    assert host.is_alive(os.getpid(), mine)
    assert not host.is_alive(os.getpid(), mine + 1)
    assert host.start_time(peer.pid) >= mine
    assert host.start_time(4194304) is None
    assert not host.is_alive(4194304, 0)


def start_in_child() -> tuple[int, int]:
    read, write = os.pipe()
    host.own_start_time()
    pid = os.fork()
    if not pid:
        os.write(write, str(host.own_start_time()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return int(os.read(read, 99)), host.own_start_time()


def test_forked_child_is_another_process(peer: Peer) -> None:
    """A child does not remember its parent's start time as its own."""
    child, parent = peer.call(start_in_child)
    assert child >= parent > 0


def test_command_with_parentheses(tmp_path: Path) -> None:
    """A process whose name looks like the end of one is read right."""
    script = tmp_path / "a) S 1 (b"
    script.symlink_to("/bin/sleep")
    with subprocess.Popen([script, "60"]) as process:
        try:
            assert host.start_time(process.pid) >= host.own_start_time()
        finally:
            process.kill()


def test_without_a_descriptor_everyone_counts_as_alive(monkeypatch):
    """Who cannot look must not take for dead, and give away, what is a living process's."""

    def full(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(host, "open", full, raising=False)
    assert host.is_alive(os.getpid(), 1)
    with pytest.raises(OSError, match="Too many open files"):
        host.start_time(os.getpid())
