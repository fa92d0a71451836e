"""What follows from what the nodes saw of one mount: pure decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmrpc._version import __version__
from mmrpc.rpc.handshake.messages import Proven
from mmrpc.rpc.handshake.nonce import ID_FILE
from mmrpc.rpc.handshake.report import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mmrpc.config import ClusterConfig, MountConfig
    from mmrpc.rpc.handshake.messages import Hello
    from mmrpc.rpc.handshake.report import FileMark, MountReport, Proof


def own_version() -> str:
    """The version of mmrpc that runs here."""
    return __version__


def choose(
    name: str,
    config: MountConfig,
    reports: Sequence[MountReport],
    hosts: Mapping[str, str],
    cluster: ClusterConfig,
) -> Proven | Problem | str | None:
    """Decides how it is to be shown that all nodes mean the same by a mount.

    Args:
        name: The mount.
        config: What the config asks for.
        reports: What each node that has it saw, none with a problem, in order of rank.
        hosts: The host of each node.
        cluster: The config, for its places.

    Returns:
        What is already proven, why it cannot be, or the node that shall write a nonce; None if
        no node has the mount.
    """
    if not reports:
        return None
    if config.trust == "declared":
        return Proven(mount=name, proof="declared")
    if len(reports) == 1:
        return Proven(mount=name, proof="one-host")
    writer = next((report.node for report in reports if report.writable), None)
    if writer is None and config.access == "write":
        # Whether an object can be written is known only by writing one.
        writer = next((report.node for report in reports if report.writable is None), None)
    if writer is not None:
        return writer
    if any(report.mount_id for report in reports):
        return _compare_ids(name, reports, cluster)
    if all(report.path.find("://") > 0 for report in reports):
        return Proven(mount=name, proof="content")
    roots = {(hosts[report.node], report.root) for report in reports}
    if len(roots) == 1:
        return Proven(mount=name, proof="one-host")
    nodes = ", ".join(report.node for report in reports)
    return Problem(
        reason=f"nothing shows that it is the same on {nodes}: none of them may write to it, and "
        f"it has no {ID_FILE} file",
        hint="Run 'mmrpc check --write-id' once as someone who may write there, or set "
        f"mounts.{name}.trust to declared.",
        mount=name,
        node=reports[0].node,
        path=reports[0].path,
        place=_place(cluster, reports[0]),
    )


def _compare_ids(
    name: str, reports: Sequence[MountReport], cluster: ClusterConfig
) -> Proven | Problem:
    first = next(report for report in reports if report.mount_id)
    for report in reports:
        if report.mount_id == first.mount_id:
            continue
        what = "has no" if report.mount_id is None else "has another"
        return Problem(
            reason=f"this is not the directory that {first.node} has at {first.path!r}: it {what} "
            f"{ID_FILE} file",
            hint=f"Mount the same file system, or fix nodes.{report.node}.mounts.{name}.",
            node=report.node,
            mount=name,
            path=report.path,
            place=_place(cluster, report),
        )
    return compare(name, "id-file", [report.mount_mark for report in reports if report.mount_mark])


def compare(name: str, proof: Proof, marks: Iterable[FileMark]) -> Proven:
    """Says what of one file's identity is the same on all nodes."""
    inodes, generations = set(), set()
    for mark in marks:
        inodes.add(mark.inode)
        generations.add(mark.generation)
    same_inode = len(inodes) == 1 and inodes != {0}
    return Proven(
        mount=name,
        proof=proof,
        inode_comparable=same_inode,
        generation_comparable=same_inode and len(generations) == 1 and generations != {""},
    )


def warnings(hellos: Iterable[Hello], cluster: ClusterConfig) -> Iterator[str]:
    """Tells of what works, and may yet surprise: unlike versions, and nowhere to put copies."""
    hellos = sorted(hellos, key=lambda hello: hello.rank)  # not as they happened to come
    for node in dict.fromkeys(hello.node for hello in hellos):
        config = cluster.nodes.get(node)
        if config is not None and config.cache_dir is None:
            remote = [name for name, root in config.mounts.items() if "://" in root]
            if remote:
                yield (
                    f"{node} can open nothing in {', '.join(remote)}: a remote file is copied "
                    f"first, and nodes.{node}.cache_dir is not set"
                )
    versions: dict[str, dict[str, list[int]]] = {"torch": {}, "Python": {}}
    for hello in hellos:
        python = hello.python.rpartition(".")[0]
        versions["torch"].setdefault(hello.torch, []).append(hello.rank)
        versions["Python"].setdefault(python, []).append(hello.rank)
    for what, found in versions.items():
        if len(found) > 1:
            told = "; ".join(
                f"{version} on {len(ranks)} ranks, first {min(ranks)}"
                for version, ranks in sorted(found.items())
            )
            yield f"the versions of {what} differ: {told}"


def _place(cluster: ClusterConfig, report: MountReport) -> str | None:
    place = cluster.origin.find(("nodes", report.node, "mounts", report.mount))
    return str(place) if place else None
