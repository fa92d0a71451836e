"""Is a file that was found the one that was meant? Pure decisions on what is already known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mmrpc.core.host import host_id
from mmrpc.core.resolver import stale_file
from mmrpc.errors import FileTooShortError, StaleReferenceError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from mmrpc.core.location import FileIdentity, MountLocation
    from mmrpc.paths.proof import Proof

Verify = Literal["none", "stat", "digest"]


def check_found(
    location: MountLocation,
    identity: FileIdentity,
    status: os.stat_result,
    needed_bytes: int,
    *,
    path: str,
    node: str | None,
    proof: Proof | None,
    verify: Verify,
    is_mixed: bool,
    digest: Callable[[], str],
) -> None:
    """Compares what was meant with what was found, as far as the two can be compared.

    Args:
        location: What the reference says.
        identity: Which file was found.
        status: Its status.
        needed_bytes: Bytes that it must at least have.
        path: Its path on this node, for errors.
        node: Name of this node, for errors.
        proof: What is comparable between the hosts; None if the sender is on this one.
        verify: What the config asks to compare.
        is_mixed: Whether only contents compare, since the mount is remote on some nodes.
        digest: Computes the digest of what was found.

    Raises:
        FileTooShortError: If it has fewer bytes than needed.
        StaleReferenceError: If it is another file, or another version.
    """
    if status.st_size < needed_bytes:
        raise FileTooShortError(
            f"it has {status.st_size:,} bytes and the tensor needs {needed_bytes:,}",
            path=path,
            mount=location.mount,
            node=node,
            hint="Was it truncated, or is it still being written?",
            needed_bytes=needed_bytes,
            actual_bytes=status.st_size,
        )
    meant = location.identity
    if is_mixed:
        if not location.content and location.host == host_id():
            # Made for this host only, by a node that has the mount as a directory too.
            same = identity == meant
        else:
            same = location.content == digest()
    elif proof is None:
        same = identity == meant
    else:
        same = verify == "none" or (
            status.st_size == location.size_bytes
            and (not proof.inodes_comparable or identity.inode == meant.inode)
            and (not proof.generations_comparable or identity.generation == meant.generation)
        )
        if same and verify == "digest":
            same = location.content == digest()
    if not same:
        error: StaleReferenceError = stale_file(path, node)
        error.mount = location.mount
        raise error
