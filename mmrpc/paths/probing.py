"""Look at one mount, and at several from a helper process; each look may hang.

As a program, it reads a task from its standard input and writes a line of JSON per mount as
soon as it knows; `mmrpc.paths.checks` starts it and keeps the time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from mmrpc.core import files, sweep
from mmrpc.errors import MmrpcError, PathError, PathNotFoundError
from mmrpc.paths.fstype import file_system_of
from mmrpc.paths.mounts import Mount
from mmrpc.paths.remote import Remote
from mmrpc.paths.report import ProbeReport


def probe(mount: Mount, *, node: str | None = None) -> ProbeReport:
    """Looks at a mount in this thread; it does not come back before the file system answers."""
    started = time.monotonic()
    report = ProbeReport(mount.name, node, mount.root, mount.access)
    look = _look_local if mount.is_local else _look_remote
    try:
        report = look(mount, report)
    except _Found as found:
        error = found.error
        report = replace(
            found.report, error=type(error).__name__, reason=error.reason, hint=error.hint
        )
    return replace(report, elapsed_s=round(time.monotonic() - started, 6))


class _Found(Exception):  # noqa: N818 (it ends a probe, and is not seen outside)
    def __init__(self, report: ProbeReport, error: MmrpcError) -> None:
        super().__init__(str(error))
        self.report = report
        self.error = error


def _look_local(mount: Mount, report: ProbeReport) -> ProbeReport:
    hint = f"Mount it, or fix nodes.{report.node or '<node>'}.mounts.{mount.name}."
    try:
        # Not O_PATH: some network file systems answer that from memory.
        fd = os.open(mount.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _Found(report, _root_error(error, mount, hint)) from None
    try:
        system = file_system_of(mount.root)
        free = os.statvfs(fd)
        report = replace(
            report,
            exists=True,
            file_system=system.kind,
            source=system.source,
            reader=mount.reader or system.default_reader,
            free_bytes=free.f_bavail * free.f_frsize,
        )
        with os.scandir(fd) as entries:
            next(entries, None)
    except OSError as error:
        raise _Found(report, files.path_error(error, mount.root)) from None
    finally:
        os.close(fd)
    report = replace(report, readable=True)
    if mount.access == "write":
        try:
            _write_local(mount.root)
        except OSError as error:
            typed = files.path_error(error, mount.root, writing=True)
            raise _Found(replace(report, writable=False), typed) from None
        report = replace(report, writable=True)
    return report


def _root_error(error: OSError, mount: Mount, hint: str) -> PathError:
    if error.errno == errno.ENOENT:
        return PathNotFoundError("no such directory", path=mount.root, hint=hint)
    if error.errno == errno.ENOTDIR:
        return PathNotFoundError("it is not a directory", path=mount.root, hint=hint)
    return files.path_error(error, mount.root)


def _write_local(root: str) -> None:
    sweep.sweep(root)
    try:
        os.close(os.open(root, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS, errno.EINVAL):
            raise
    else:
        return
    name = sweep.part_name(os.path.join(root, "probe"))
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(name)
    finally:
        os.close(fd)


def _look_remote(mount: Mount, report: ProbeReport) -> ProbeReport:
    report = replace(
        report, file_system=mount.root.partition(":")[0], reader=mount.reader or "mmap"
    )
    try:
        remote = Remote(mount, node=report.node)
        report = replace(report, implementation=remote.implementation)
        report = replace(report, **_list_remote(remote))
        if mount.access == "write":
            report = replace(report, writable=False)
            name = f".mmrpc-probe-{secrets.token_hex(8)}"
            remote.create(name, b"probe")
            with contextlib.suppress(PathNotFoundError):
                remote.remove(name)
            report = replace(report, writable=True)
    except MmrpcError as error:
        raise _Found(report, error) from None
    return report


def _list_remote(remote: Remote) -> dict[str, Any]:
    try:
        remote.list()
    except PathNotFoundError:
        if not remote.mount.root.startswith("http"):
            raise
        # A web server need not show its directories: the first file will tell.
        return {"exists": True, "readable": None}
    return {"exists": True, "readable": True}


def main() -> None:
    """Runs the task on standard input."""
    task = json.loads(sys.stdin.readline())
    mounts = [Mount(**fields) for fields in task["mounts"]]
    lock = threading.Lock()

    def tell(line: Any) -> None:
        with lock:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    def run(index: int, mount: Mount) -> None:
        report = probe(mount, node=task["node"])
        tell({"index": index, "report": report.to_dict()})

    # Daemons: this program ends with whoever started it, also when a mount does not answer.
    looks = [
        threading.Thread(target=run, args=(index, mount), daemon=True)
        for index, mount in enumerate(mounts)
    ]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _import_clients(mounts)
    tell("ready")
    for look in looks:
        look.start()
    for look in looks:
        look.join()


def _import_clients(mounts: list[Mount]) -> None:
    """Loads what serves the URLs before the clock starts: on a busy machine it takes seconds."""
    for scheme in {mount.root.partition(":")[0] for mount in mounts if not mount.is_local}:
        from fsspec.registry import get_filesystem_class

        with contextlib.suppress(Exception):  # the probe itself says what is wrong
            get_filesystem_class(scheme)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
