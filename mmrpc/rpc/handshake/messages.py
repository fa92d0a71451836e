"""What ranks and their coordinator tell each other in the handshake: pure data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from mmrpc.rpc.handshake.report import FileMark, Frozen, MountReport, Problem, Proof


class Nonce(Frozen):
    """A file that one node wrote for the others to read.

    Attributes:
        mount: The mount that it is in.
        name: Its name in the mount's root.
        text: What it holds.
        writer: The node that wrote it.
        path: The mount's path there.
        mark: What it looks like there.
    """

    mount: str
    name: str
    text: str
    writer: str
    path: str
    mark: FileMark


class Hello(Frozen):
    """A rank has come.

    Attributes:
        rank: Its number.
        worker: Its name.
        node: Name of its node; empty if it could not tell.
        host: `mmrpc.core.system.host.host_id` there.
        network: Identity of the host's network: loopback is shared by those who have the same.
        pid: Its process.
        address: The address at which RPC will listen.
        world_size: How many ranks it expects.
        config: Hash of its config.
        sections: Hash of each part of its config, to say which differs.
        mmrpc: Version of mmrpc.
        torch: Version of torch.
        python: Version of Python.
        problem: What keeps it from taking part.
    """

    kind: Literal["hello"] = "hello"
    rank: int
    worker: str
    node: str
    host: str
    network: str
    pid: int
    address: str
    world_size: int
    config: str
    sections: dict[str, str]
    mmrpc: str
    torch: str
    python: str
    problem: Problem | None = None


class Probed(Frozen):
    """A node has looked at its mounts."""

    kind: Literal["probed"] = "probed"
    rank: int
    mounts: tuple[MountReport, ...]


class Wrote(Frozen):
    """A node has written its nonces, or could not."""

    kind: Literal["wrote"] = "wrote"
    rank: int
    nonces: tuple[Nonce, ...] = ()
    problems: tuple[Problem, ...] = ()


class Read(Frozen):
    """A node has read nonces of others, or could not.

    Attributes:
        rank: Its prober.
        marks: Mounts to what the nonce looks like there.
        problems: The mounts where it could not be read.
    """

    kind: Literal["read"] = "read"
    rank: int
    marks: dict[str, FileMark] = Field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


class Expired(Frozen):
    """The time is over; the coordinator sends it to itself."""

    kind: Literal["expired"] = "expired"


class ProbeTask(Frozen):
    """Look at all mounts of your node."""

    kind: Literal["probe"] = "probe"


class WriteTask(Frozen):
    """Write a nonce into each of these mounts."""

    kind: Literal["write"] = "write"
    mounts: tuple[str, ...]


class ReadTask(Frozen):
    """Read these nonces."""

    kind: Literal["read"] = "read"
    nonces: tuple[Nonce, ...]


class Proven(Frozen):
    """What holds for a mount on all nodes."""

    mount: str
    proof: Proof
    inode_comparable: bool = False
    generation_comparable: bool = False


class Verdict(Frozen):
    """How it ended, the same for all; its size does not grow with the number of nodes.

    Attributes:
        problems: The first of what was found; empty if all is well.
        problem_count: How many there were.
        proven: The mounts.
        warnings: What is allowed and unwise.
        present: How many ranks are there to read it.
        coordinator: Name of the worker that has the whole report.
        is_one_host: Whether all ranks are on one host, with one view of the file systems.
    """

    kind: Literal["verdict"] = "verdict"
    problems: tuple[Problem, ...] = ()
    problem_count: int = 0
    proven: tuple[Proven, ...] = ()
    warnings: tuple[str, ...] = ()
    present: int
    coordinator: str
    is_one_host: bool = False


ToCoordinator = Hello | Probed | Wrote | Read | Expired
ToRank = ProbeTask | WriteTask | ReadTask | Verdict

to_coordinator: TypeAdapter[ToCoordinator] = TypeAdapter(
    Annotated[ToCoordinator, Field(discriminator="kind")]
)
to_rank: TypeAdapter[ToRank] = TypeAdapter(Annotated[ToRank, Field(discriminator="kind")])
