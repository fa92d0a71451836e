"""What each node proved about each mount: the models that `path_report` gives, and problems."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from mmrpc.rpc.handshake import table

Proof = Literal["nonce", "id-file", "content", "declared", "one-host"]
"""How it is known that all nodes mean the same by a mount.

``nonce``: one node wrote a file and the others read it. ``id-file``: all read the same
``.mmrpc-mount``. ``content``: a remote store; each reference carries the content's identity.
``declared``: the config says so, and it is not proven. ``one-host``: it is one directory of one
host, so there is nothing to prove.
"""


class Frozen(BaseModel):
    """Base of what travels in the handshake."""

    # Another version may say more: then it shall be told that it is another.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Problem(Frozen):
    """Why the handshake failed, or one of the reasons.

    Attributes:
        reason: A clause that tells what is wrong.
        hint: A sentence that tells what to do.
        rank: The process that it is about.
        node: Its node.
        mount: The mount that it is about.
        path: The mount's path on that node.
        place: File, line and column of the config.
    """

    reason: str
    hint: str | None = None
    rank: int | None = None
    node: str | None = None
    mount: str | None = None
    path: str | None = None
    place: str | None = None

    def clause(self) -> str:
        """Everything but node and hint, as one clause."""
        who = f"rank {self.rank}: " if self.rank is not None else ""
        mount = f" (mount {self.mount!r})" if self.mount else ""
        what = f"{self.path!r}{mount}: " if self.path else ""
        place = f" [{self.place}]" if self.place else ""
        return f"{who}{what}{self.reason}{place}"

    def sentence(self) -> str:
        """Everything, as one or two sentences."""
        who = f"on {self.node}: " if self.node else ""
        return f"{who}{self.clause()}." + (f" {self.hint}" if self.hint else "")


class FileMark(Frozen):
    """What can be compared of one file as two nodes see it.

    Attributes:
        inode: Its inode number; 0 for an object.
        generation: Its file handle or birth time, in hex; empty if not known or weak.
    """

    inode: int = 0
    generation: str = ""


class MountReport(Frozen):
    """One mount on one node.

    Attributes:
        mount: Name of the mount.
        node: Name of the node.
        path: The absolute path or URL there.
        file_system: Type as the kernel calls it (``nfs4``), or the URL's scheme.
        implementation: fsspec's class and the version of its package, for a URL.
        readable: Whether it can be listed and entered; None for a server that does not list.
        writable: Whether files can be made in it; None where only making one would tell.
        free_bytes: Bytes that an unprivileged user could still write; None if unknown.
        reader: How references are read there.
        mount_id: Content of its ``.mmrpc-mount`` file.
        mount_mark: What that file looks like there.
        root: Identity of its directory on that host; empty for a URL.
        same_as_others: Whether the proof held on that node; None if nothing was proven.
        inode_comparable: Whether the file of the proof had one inode number on all nodes.
        generation_comparable: Whether it also had one file handle or birth time.
        proof: How it was proven.
        problem: What is wrong with it.
    """

    mount: str
    node: str
    path: str
    file_system: str = "unknown"
    implementation: str | None = None
    readable: bool | None = False
    writable: bool | None = None
    free_bytes: int | None = None
    reader: Literal["mmap", "prefetch", "copy"] | None = None
    mount_id: str | None = None
    mount_mark: FileMark | None = None
    root: str = ""
    same_as_others: bool | None = None
    inode_comparable: bool = False
    generation_comparable: bool = False
    proof: Proof | None = None
    problem: Problem | None = None


class NodeReport(Frozen):
    """One node, as its first process told.

    Attributes:
        node: Name of the node.
        host: Identity of the host and its view of the file systems.
        address: The address at which RPC can be reached there.
        ranks: Its processes.
        mmrpc: Version of mmrpc.
        torch: Version of torch.
        python: Version of Python.
    """

    node: str
    host: str
    address: str
    ranks: tuple[int, ...]
    mmrpc: str
    torch: str
    python: str


class PathReport(Frozen):
    """What the nodes proved to each other; printed, a table.

    Attributes:
        nodes: The nodes, in order of their first rank.
        mounts: Each mount on each node that has it.
        warnings: What is allowed and unwise, such as different versions of torch.
    """

    nodes: tuple[NodeReport, ...] = ()
    mounts: tuple[MountReport, ...] = ()
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(table.lines(self))

    def get(self, mount: str, node: str) -> MountReport:
        """Gives one cell of the matrix.

        Raises:
            KeyError: If that node does not have that mount.
        """
        for report in self.mounts:
            if (report.mount, report.node) == (mount, node):
                return report
        raise KeyError((mount, node))
