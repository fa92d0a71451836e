"""What holds for every test: the parts it needs, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest

from tests.needs import REQUIRE_ALL, missing

# Before torch is imported anywhere: its compile workers would outlive the test that made them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A run that a test starts; what is true of the outer one is true of it.
_IS_INNER = "MMRPC_TEST_RUN" in os.environ
# Inherited by all that a test starts, so that also orphans can be told from other people's.
_RUN_MARK = f"MMRPC_TEST_RUN={os.getpid()}"
os.environ["MMRPC_TEST_RUN"] = str(os.getpid())

_LASTING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_SHM = "/dev/shm"
_GRACE_S = 3
_RUNS = os.open(
    f"{tempfile.gettempdir()}/mmrpc-tests-of-{os.getuid()}.lock", os.O_CREAT | os.O_RDWR, 0o600
)
fcntl.flock(_RUNS, fcntl.LOCK_SH)  # as long as this run lasts
_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*parts): parts of the machine; see tests/needs.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for part in mark.args:
            if problem := missing(part):
                pytest.skip(f"needs {part}: {problem}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _required(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _required(report)


def _required(report: _Report) -> _Report:
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"MMRPC_REQUIRE_ALL=1, and skipped: {reason}"
    return report


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves processes or, where all is required, files in /dev/shm."""
    processes, files = set(_processes_of_this_run()), set(os.listdir(_SHM))
    yield
    deadline = time.monotonic() + _GRACE_S
    while left := set(_processes_of_this_run()) - processes:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    told = [f"process {pid}: {_command(pid)}" for pid in left]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # Elsewhere other programs make files there too, and a file does not tell whose it is.
    new = set(os.listdir(_SHM)) - files if REQUIRE_ALL and _is_only_run() else set()
    while new and (new := {name for name in new if _is_left(name)}):
        if time.monotonic() > deadline:
            told += [f"{_SHM}/{name}" for name in new]
            break
        time.sleep(0.1)
    if told:
        pytest.fail("the test left behind " + "; ".join(told))


def _is_only_run() -> bool:
    """Whether no other run of this user's is under way, whose files could be taken for ours."""
    if _IS_INNER:
        return True
    try:
        fcntl.flock(_RUNS, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        fcntl.flock(_RUNS, fcntl.LOCK_SH)


def _processes_of_this_run() -> Iterator[int]:
    """PIDs of our descendants, and of those whose parent has ended."""
    me = os.getpid()
    parents: dict[int, int] = {}
    ours: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        with contextlib.suppress(OSError):
            state, parent = _read(pid, "stat").rpartition(b")")[2].split()[:2]
            if state == b"Z":
                continue
            parents[pid] = int(parent)
            # A forked process shows the environment of the one that was executed, so the mark
            # tells of those that were executed and the parents of those that were not.
            if pid != me and _RUN_MARK.encode() in _read(pid, "environ").split(b"\0"):
                ours.add(pid)
    grown = True
    while grown:
        more = {p for p, parent in parents.items() if parent == me or parent in ours} - ours
        grown = bool(more)
        ours |= more
    return (pid for pid in ours if not any(word in _command(pid) for word in _LASTING))


def _is_left(shm_name: str) -> bool:
    """Whether a file is there and in no other process, so that other people's runs are none."""
    try:
        status = os.stat(f"{_SHM}/{shm_name}")
    except FileNotFoundError:
        return False
    if status.st_uid != os.geteuid():
        return False
    # By inode: a semaphore is mapped under a name that it had before.
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    entry = f" {device} {status.st_ino} ".encode()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if entry in _read(int(name), "maps"):
                    return False
    return True


def _read(pid: int, what: str) -> bytes:
    with open(f"/proc/{pid}/{what}", "rb") as file:
        return file.read()


def _command(pid: int) -> str:
    try:
        return os.fsdecode(_read(pid, "cmdline").replace(b"\0", b" ").strip())
    except OSError:
        return ""
