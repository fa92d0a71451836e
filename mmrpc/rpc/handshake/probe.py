"""What a node tells of its mounts: the probes of `mmrpc.paths`, and what proofs need besides."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mmrpc.core.identity import identify
from mmrpc.errors import PathError
from mmrpc.paths.checks import probe_mounts
from mmrpc.paths.deadline import Deadline
from mmrpc.paths.mounts import MountTable
from mmrpc.rpc.handshake import nonce
from mmrpc.rpc.handshake.report import MountReport, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmrpc.config import ClusterConfig
    from mmrpc.paths.mounts import Mount
    from mmrpc.paths.report import ProbeReport

    Probe = Callable[[list[Mount], float, str], list[ProbeReport]]


def probe_in_helper(mounts: list[Mount], timeout_s: float, node: str) -> list[ProbeReport]:
    """Probes mounts at the same time, from a process that may hang in our stead."""
    return probe_mounts(mounts, timeout_s=timeout_s, node=node)


def probe_node(
    cluster: ClusterConfig, node: str, probe: Probe = probe_in_helper
) -> tuple[MountReport, ...]:
    """Looks at all mounts of a node; what is wrong with one is in its report."""
    mounts = list(MountTable.from_config(cluster, node))
    found = probe(mounts, cluster.rpc.mount_timeout_s, node)
    return tuple(
        _report(mount, report, cluster, node) for mount, report in zip(mounts, found, strict=True)
    )


def problem_of(error: Exception, mount: Mount, cluster: ClusterConfig, node: str) -> Problem:
    """Turns what went wrong with a mount into a problem, in which the path is the mount's."""
    fix = f"Mount it, or fix nodes.{node}.mounts.{mount.name}."
    if isinstance(error, PathError):
        inner = f"{error.path!r}: " if error.path not in (None, mount.root) else ""
        reason, hint = inner + error.reason, error.hint or fix
    elif isinstance(error, TimeoutError):
        reason, hint = str(error), f"Is its server up? {fix}"
    else:
        reason, hint = f"it could not be used ({type(error).__name__}: {error})", fix
    place = cluster.origin.find(("nodes", node, "mounts", mount.name))
    return Problem(
        reason=reason,
        hint=hint,
        node=node,
        mount=mount.name,
        path=mount.root,
        place=str(place) if place else None,
    )


def _report(mount: Mount, found: ProbeReport, cluster: ClusterConfig, node: str) -> MountReport:
    report = MountReport(
        mount=mount.name,
        node=node,
        path=mount.root,
        file_system=found.file_system,
        implementation=found.implementation or None,
        readable=found.readable,
        writable=found.writable,
        free_bytes=found.free_bytes,
        reader=found.reader,
    )
    error: Exception | None = found.problem()
    if error is None:
        try:
            look = Deadline(cluster.rpc.mount_timeout_s)
            return look.call(lambda: _add_identity(mount, report))
        except Exception as failure:
            error = failure
    problem = problem_of(error, mount, cluster, node)
    return report.model_copy(update={"problem": problem})


def _add_identity(mount: Mount, report: MountReport) -> MountReport:
    update: dict[str, object] = {}
    found = nonce.read_id(mount, report.node)
    if found is not None:
        update = {"mount_id": found[0], "mount_mark": found[1]}
    if mount.is_local:
        fd = os.open(mount.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            identity = identify(fd)
        finally:
            os.close(fd)
        update["root"] = f"{identity.device}:{identity.inode}:{identity.generation.hex()}"
        if report.writable is None:
            # Not what the config asks for, but who may write can also leave a proof.
            update["writable"] = nonce.can_write(mount)
    return report.model_copy(update=update)
