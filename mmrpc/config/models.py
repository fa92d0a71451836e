"""The parts of a cluster config, each a frozen model that refuses unknown keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from mmrpc.config.secrets import mask_env
from mmrpc.config.values import (
    AbsolutePath,
    Bytes,
    Env,
    Host,
    Integer,
    MountRoot,
    Program,
    Seconds,
    Table,
    Text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Reader = Literal["mmap", "prefetch", "copy"]
"""How a node reads a mount: mapped; mapped and read ahead; or read into memory, never mapped."""


_MOST_WORKERS = 4096
"""Of one role on one node: far more than one runs. A slip of the key would be planned for ever."""


class Model(BaseModel):
    """Base of all parts: frozen, no unknown keys, no secret in its repr."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        # The input may hold secrets; the loader says where the value stands instead.
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, mask_env(value) if name == "env" and isinstance(value, dict) else value


class MasterConfig(Model):
    """Where the ranks meet before they know each other.

    Attributes:
        node: The node whose address everyone connects to. By default the first node.
        port: TCP port of the rendezvous and of RPC. 0 is any free port, which needs all nodes on
            one host, or a launcher that tells the others which one it was.
        process_group_port: Port for a process group beside RPC, if the job makes one.
    """

    node: str
    port: Integer = Field(default=0, ge=0, le=65535)
    process_group_port: Integer | None = Field(default=None, ge=1, le=65535)

    @model_validator(mode="after")
    def _check_ports(self) -> MasterConfig:
        if self.process_group_port is not None and self.process_group_port == self.port:
            raise ValueError(
                f"port and process_group_port are both {self.port}: RPC and a process group "
                "cannot meet at one port"
            )
        return self


class MountConfig(Model):
    """What every node must be able to do with a mount, whatever its path there.

    Attributes:
        access: ``write`` if a job's workers write files to it, on any node.
        reader: ``mmap``; ``prefetch``, which reads ahead; or ``copy``, which maps nothing. By
            default from the type of the file system, node by node.
        trust: ``declared`` takes your word that all nodes have the same files there, where they
            cannot prove it.
        immutable: Its files never change, so one without a version or time may be kept.
    """

    access: Literal["read", "write"] = "read"
    reader: Reader | None = None
    trust: Literal["proven", "declared"] = "proven"
    immutable: bool = False

    @model_validator(mode="after")
    def _check_immutable(self) -> MountConfig:
        if self.immutable and self.access == "write":
            raise ValueError("an immutable mount cannot have access: write")
        return self


class SshConfig(Model):
    """How to reach a node by the system's ``ssh``; what is unset is left to ``ssh_config``.

    Attributes:
        host: Name for ``ssh``, if it is not the node's `host`; may be an alias of ``ssh_config``.
        port: Port of ``sshd``.
        user: Remote user.
        config_file: A file for ``ssh -F``.
        options: Further ``-o`` options, such as ``ProxyJump=gate``.
    """

    host: Host | None = None
    port: Integer | None = Field(default=None, ge=1, le=65535)
    user: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\$?$")
    config_file: AbsolutePath | None = None
    options: tuple[Text, ...] = ()


class NodeConfig(Model):
    """One machine (or one of several parts of one) and where things are on it.

    Attributes:
        host: Name or address at which the other nodes reach it.
        python: Its interpreter; by default the launcher's, which is right only on one machine.
        cwd: Working directory of its workers; by default the launcher's.
        env: Further environment of its workers.
        interface: Network interface for RPC; sets both variables that torch wants.
        mounts: Mount names to paths or URLs on this node.
        cache_dir: Directory for copies of remote files, on this node's own disk.
        cache_bytes: Most that those copies may take, such as ``200GiB``.
        log_dir: Directory for this node's logs, instead of `logs.dir`.
        ssh: How to reach it, for ``launch.via: ssh``.
    """

    host: Host = "127.0.0.1"
    python: Program | None = None
    cwd: AbsolutePath | None = None
    env: Env = Field(default_factory=dict)
    interface: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.@-]{1,15}$")
    mounts: Table[MountRoot] = Field(default_factory=dict)
    cache_dir: AbsolutePath | None = None
    cache_bytes: Bytes | None = Field(default=None, gt=0)
    log_dir: AbsolutePath | None = None
    ssh: SshConfig = SshConfig()


class RoleConfig(Model):
    """What one kind of worker runs, and where.

    Attributes:
        target: ``module:function``, the path of a script, or a command.
        workers: Node names to numbers of workers there.
        args: Arguments of the function (as strings), script or command.
        env: Further environment of these workers; wins over their node's.
    """

    target: Text = Field(min_length=1)
    workers: Table[Integer]
    args: tuple[Text, ...] = ()
    env: Env = Field(default_factory=dict)

    @field_validator("workers")
    @classmethod
    def _check_counts(cls, workers: dict[str, int]) -> dict[str, int]:
        for node, count in workers.items():
            if count < 0:
                raise ValueError(f"{count} workers on {node}: a count cannot be negative")
            if count > _MOST_WORKERS:
                raise ValueError(f"{count:,} workers on {node}: it can run {_MOST_WORKERS:,}")
        return workers


class RpcConfig(Model):
    """How calls and the references in them behave.

    Attributes:
        timeout_s: Seconds that a call may take.
        threads: Threads that serve calls, two at least: with one, a call that makes a nested
            call waits for a thread that it holds itself.
        verify: What is checked when a reference is opened: nothing beyond identity where the
            sender is on this host (``none``), size and identity (``stat``), or also the content
            (``digest``, which reads the whole file).
        share_above_bytes: Plain tensors of at least so many bytes go through shared memory to
            processes of the host; 0 turns that off.
        unshared: What to do with a tensor that the other node cannot reach: ``refuse`` with
            `NotSharedError`, or ``copy`` its bytes into the message.
        same_host_paths: Whether a reference from the same host may name a file outside the
            mounts, which the receiver could have opened by itself.
        handshake_timeout_s: Seconds for all ranks to arrive and prove their mounts.
        mount_timeout_s: Seconds that a file system may take to answer one probe.
        visibility_timeout_s: Seconds that a new file may take to be seen by another node.
        transports: TensorPipe's transports. ``uv`` sleeps when idle; torch's own choice includes
            ``shm``, which busies one core per process. Null leaves it to torch.
        channels: TensorPipe's channels. Null leaves it to torch.
    """

    timeout_s: Seconds = Field(default=60.0, gt=0)
    threads: Integer = Field(default=8, le=1024)
    verify: Literal["none", "stat", "digest"] = "stat"
    share_above_bytes: Bytes = Field(default=ByteSize(8 << 20), ge=0)
    unshared: Literal["refuse", "copy"] = "refuse"
    same_host_paths: bool = True
    handshake_timeout_s: Seconds = Field(default=60.0, gt=0)
    mount_timeout_s: Seconds = Field(default=10.0, gt=0)
    visibility_timeout_s: Seconds = Field(default=30.0)
    transports: tuple[Literal["uv", "shm", "ibv"], ...] | None = ("uv",)
    channels: tuple[Literal["basic", "cma", "mpt_uv"], ...] | None = ("basic",)

    @field_validator("threads")
    @classmethod
    def _check_threads(cls, threads: int) -> int:
        if threads < 2:
            raise ValueError(
                "at least 2 threads are needed: with one, a call that makes a nested call waits "
                "for the thread that it holds itself"
            )
        return threads


class LaunchConfig(Model):
    """How the workers are started, and ended.

    Attributes:
        via: How agents reach their nodes. ``manual`` leaves it to you.
        max_restarts: How often the whole gang is started again after a failure.
        start_timeout_s: Seconds for all agents to report.
        grace_s: Seconds between SIGTERM and SIGKILL.
        ssh_options: ``-o`` options for every node.
        srun_options: Further arguments of ``srun``.
        sbatch_options: Further ``#SBATCH`` lines, such as ``--time=1:00:00``.
    """

    via: Literal["local", "ssh", "slurm", "manual"] = "local"
    max_restarts: Integer = Field(default=0, ge=0)
    start_timeout_s: Seconds = Field(default=60.0, gt=0)
    grace_s: Seconds = Field(default=10.0, gt=0)
    ssh_options: tuple[Text, ...] = ()
    srun_options: tuple[Text, ...] = ()
    sbatch_options: tuple[Text, ...] = ()


class LogsConfig(Model):
    """Where output goes.

    Attributes:
        dir: Directory of all runs. A relative one is in the launcher's working directory, and on
            other nodes in the node's `cwd`.
        tee: Workers whose output is also shown on the console. ``[all]`` is every worker.
    """

    dir: Text = Field(default="runs", min_length=1)
    tee: tuple[str, ...] = ("all",)
