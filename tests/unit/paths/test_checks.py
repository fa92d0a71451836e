"""Probes of mounts: what they find, and that they come back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mmrpc import errors
from mmrpc.core.location import FileIdentity, Mode, MountLocation
from mmrpc.paths import checks, probing
from mmrpc.paths.access import Policy
from mmrpc.paths.checks import probe_mounts
from mmrpc.paths.mounts import Mount, MountTable
from mmrpc.paths.probing import probe
from mmrpc.paths.proof import Proof
from mmrpc.paths.report import ProbeReport
from mmrpc.paths.resolver import ClusterResolver
from tests.distributed.sshd import Sshd, serving
from tests.needs import needs


def one(mount: Mount, timeout_s: float = 30.0) -> ProbeReport:
    (report,) = probe_mounts([mount], timeout_s=timeout_s, node="a")
    return report


def test_a_good_mount_is_described(root: Path) -> None:
    """Type, source, reader and free bytes are those of the file system."""
    report = one(Mount("data", str(root), "write"))
    assert report.is_good
    assert report.problem() is None
    assert (report.mount, report.node, report.path) == ("data", "a", str(root))
    assert (report.exists, report.readable, report.writable) == (True, True, True)
    free = os.statvfs(root)
    assert report.free_bytes == pytest.approx(free.f_bavail * free.f_frsize, rel=0.5)
    assert report.file_system != "unknown"
    assert report.elapsed_s > 0
    assert sorted(os.listdir(root)) == ["file", "sub"]


def test_reading_does_not_write(root: Path) -> None:
    """A mount that is only to be read is not written to, and the report does not say it could."""
    before = root.stat().st_mtime_ns
    assert one(Mount("data", str(root))).writable is None
    assert root.stat().st_mtime_ns == before


def test_the_chosen_reader_is_reported(root: Path) -> None:
    """The config's word counts more than the type of the file system."""
    assert one(Mount("data", str(root), reader="copy")).reader == "copy"


def test_what_is_wrong_is_a_typed_error(root: Path) -> None:
    """A missing directory and a file in its place name the line of the config."""
    missing, file, good = probe_mounts(
        [Mount("m", f"{root}/none"), Mount("f", f"{root}/file"), Mount("g", str(root))],
        timeout_s=30.0,
        node="a",
    )
    assert good.is_good
    for report, word in ((missing, "no such directory"), (file, "not a directory")):
        problem = report.problem()
        assert isinstance(problem, errors.PathNotFoundError)
        assert word in str(problem)
        assert f"nodes.a.mounts.{report.mount}" in str(problem)
        assert (problem.node, problem.path) == ("a", report.path)
        assert report.exists is False


@needs("root")
def test_another_user_may_do_less(root: Path) -> None:
    """What root may do does not count: the process that probes is asked."""
    for directory in (root, *list(root.parents)[:3]):
        directory.chmod(0o755)
    closed = root / "closed"
    closed.mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        unwritable = probe(Mount("data", str(root), "write"))
        unreadable = probe(Mount("data", str(closed)))
    finally:
        os.seteuid(0)
    assert (unwritable.readable, unwritable.writable) == (True, False)
    assert isinstance(unwritable.problem(), errors.PathNotWritableError)
    assert isinstance(unreadable.problem(), errors.PathNotReadableError)
    assert unreadable.readable is False


@needs("namespaces")
def test_a_read_only_mount(root: Path) -> None:
    """The file system's own refusal is found by trying."""
    code = (
        "import subprocess, sys\n"
        "from mmrpc.paths.mounts import Mount\n"
        "from mmrpc.paths.probing import probe\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro', 'none', sys.argv[1]], check=True)\n"
        "report = probe(Mount('data', sys.argv[1], 'write'))\n"
        "print(report.error, report.readable, report.writable, report.file_system)\n"
    )
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", code, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["PathNotWritableError", "True", "False", "tmpfs"]


def test_where_no_nameless_file_can_be_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without O_TMPFILE a named file is made and removed."""
    real = os.open
    made: list[str] = []

    def no_tmpfile(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        if flags & os.O_CREAT:
            made.append(path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(probing.os, "open", no_tmpfile)
    assert probe(Mount("data", str(root), "write")).writable
    assert len(made) == 1
    assert sorted(os.listdir(root)) == ["file", "sub"]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with serving(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@contextlib.contextmanager
def stoppable(sshd: Sshd, served: Path, mounted: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Mounts a directory of the server by a process that can be stopped."""
    served.mkdir()
    mounted.mkdir()
    command = ["sshfs", "-f", "-F", str(sshd.config_file), "-p", str(sshd.port)]
    fuse = subprocess.Popen([*command, f"root@127.0.0.1:{served}", str(mounted)])
    try:
        deadline = time.monotonic() + 60
        while not os.path.ismount(mounted):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield fuse
    finally:
        fuse.send_signal(signal.SIGCONT)
        subprocess.run(["fusermount3", "-u", "-z", str(mounted)], check=False)
        fuse.wait(30)


@needs("sshfs")
def test_a_dead_file_system_is_named_in_time(sshd: Sshd, tmp_path: Path, root: Path) -> None:
    """A server that does not answer costs its own deadline, and no other mount's answer."""
    mounted = tmp_path / "mounted"
    with stoppable(sshd, tmp_path / "served", mounted) as fuse:
        alive = one(Mount("data", str(mounted), "write"))
        assert (alive.file_system, alive.reader, alive.writable) == ("fuse.sshfs", "copy", True)
        fuse.send_signal(signal.SIGSTOP)
        mounts = [Mount("dead", str(mounted)), Mount("good", str(root))]
        dead, good = probe_mounts(mounts, timeout_s=3.0, node="a")
    assert good.is_good
    problem = dead.problem()
    assert isinstance(problem, errors.MountTimeoutError)
    assert (problem.mount, problem.node, problem.timeout_s) == ("dead", "a", 3.0)
    assert dead.readable is None


@needs("sshfs")
def test_a_reference_into_a_dead_file_system(sshd: Sshd, tmp_path: Path) -> None:
    """Opening one ends at the deadline while the process runs on, and works again afterwards."""
    mounted = tmp_path / "mounted"
    with stoppable(sshd, tmp_path / "served", mounted) as fuse:
        (tmp_path / "served" / "x").write_bytes(b"12345678")
        resolver = ClusterResolver(
            MountTable([Mount("data", str(mounted))], node="b"),
            proven={"data": Proof("data", "nonce")},
            policy=Policy(mount_timeout_s=5.0),
        )
        identity = FileIdentity(1, 1, b"h")
        location = MountLocation("data", "x", "0123456789abcdef", identity, 8)
        assert resolver.attach(location, Mode.READ, 8).nbytes == 8
        fuse.send_signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(errors.MountTimeoutError) as caught:
                resolver.attach(location, Mode.READ, 8)
        assert (caught.value.node, caught.value.mount) == ("b", "data")
        fuse.send_signal(signal.SIGCONT)
        for thread in threading.enumerate():
            if thread.name == "mmrpc-deadline":
                thread.join(60)
        assert resolver.attach(location, Mode.READ, 8).nbytes == 8


def test_a_helper_that_breaks_is_not_waited_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the helper cannot run, the report says how it ended, at once."""
    monkeypatch.setattr(checks.sys, "executable", "/bin/false")
    problem = one(Mount("data", str(root)), timeout_s=3600).problem()
    assert problem is not None
    assert "exit code 1" in str(problem)


def test_nothing_to_probe() -> None:
    """A node without mounts starts no helper."""
    assert probe_mounts([], timeout_s=0) == []


class TestRemote:
    """Mounts behind a URL."""

    def test_implementation_and_writing(self) -> None:
        """The report names class and version, as another package may have taken the scheme."""
        fsspec = pytest.importorskip("fsspec")
        fs = fsspec.filesystem("memory")
        fs.store.clear()
        fs.pipe_file("/bucket/x", b"x")
        report = probe(Mount("data", "memory://bucket", "write"))
        assert report.is_good
        assert (report.readable, report.writable) == (True, True)
        assert report.implementation.startswith("fsspec.implementations.memory.MemoryFileSystem 2")
        assert report.file_system == "memory"
        assert fs.find("/bucket") == ["/bucket/x"]

    def test_a_server_that_is_not_there(self) -> None:
        """A refused connection is a problem of that mount."""
        pytest.importorskip("aiohttp")
        report = one(Mount("data", "http://127.0.0.1:9/x"))
        assert report.error == "PathError"
        assert "ClientConnectorError" in str(report.problem())

    def test_an_unknown_scheme(self) -> None:
        """A package that is missing is named."""
        report = probe(Mount("data", "nosuch://host/x"))
        assert not report.is_good


def test_reports_survive_json(root: Path) -> None:
    """What one node reports, another reads."""
    report = replace(probe(Mount("data", str(root))), error="MountTimeoutError", reason="no answer")
    assert ProbeReport.from_dict(report.to_dict()) == report
    with pytest.raises(TypeError):
        ProbeReport.from_dict({**report.to_dict(), "other": 1})
