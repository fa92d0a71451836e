"""Is a file that was found the one that was meant? Pure decisions on what is already known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

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
    reason = _difference(location, identity, status, proof, verify, is_mixed, digest)
    if reason is not None:
        raise StaleReferenceError(
            reason,
            path=path,
            mount=location.mount,
            node=node,
            hint="It was replaced or changed after the reference was made: send a new reference.",
        )


def _difference(
    location: MountLocation,
    identity: FileIdentity,
    status: os.stat_result,
    proof: Proof | None,
    verify: Verify,
    is_mixed: bool,
    digest: Callable[[], str],
) -> str | None:
    meant = location.identity
    # A node that has a mixed mount as a directory too may have made the reference for this host.
    if proof is None and not (is_mixed and location.content):
        return None if identity == meant else "another file has that name now"
    if verify == "none" and not is_mixed:
        return None
    if status.st_size != location.size_bytes:
        return f"it has {status.st_size:,} bytes, and {location.size_bytes:,} were meant"
    if proof is not None and (
        (proof.inodes_comparable and identity.inode != meant.inode)
        or (proof.generations_comparable and identity.generation != meant.generation)
    ):
        return "another file has that name now"
    if (is_mixed or verify == "digest") and location.content != digest():
        return "its content is not the one that was meant"
    return None
