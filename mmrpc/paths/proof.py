"""What the nodes proved to each other about a mount: the handshake finds it, the resolver asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["nonce", "id-file", "content", "declared"]


@dataclass(frozen=True, slots=True)
class Proof:
    """Why a mount may be used between hosts, and what can be compared there.

    Attributes:
        mount: Name of the mount.
        method: How it was proven: a ``nonce`` that one node wrote and the others read, an
            ``id-file``, identity of the ``content`` (object stores), or ``declared`` in the
            config and not proven.
        inodes_comparable: Whether the file of the proof had one inode number on all nodes.
        generations_comparable: Whether it also had one `FileIdentity.generation`.
    """

    mount: str
    method: Method
    inodes_comparable: bool = False
    generations_comparable: bool = False
