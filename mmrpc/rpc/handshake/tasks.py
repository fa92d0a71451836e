"""What the first rank of a node does for it in the handshake, each part with a deadline."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from mmrpc.paths.deadline import Deadline
from mmrpc.paths.fstype import file_system_of
from mmrpc.paths.mounts import MountTable
from mmrpc.rpc.handshake import nonce
from mmrpc.rpc.handshake.messages import Nonce, Probed, ProbeTask, Read, ReadTask, WriteTask, Wrote
from mmrpc.rpc.handshake.probe import probe_in_helper, probe_node, problem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mmrpc.config import ClusterConfig
    from mmrpc.paths.mounts import Mount
    from mmrpc.rpc.handshake.probe import Probe
    from mmrpc.rpc.handshake.report import FileMark, Problem

T = TypeVar("T")
_MOST_AT_ONCE = 8


class NodeTasks:
    """Does a node's part, and removes what it wrote.

    Args:
        cluster: The config.
        node: Name of this node.
        probe: Looks at mounts; in a helper process unless told otherwise.
    """

    def __init__(self, cluster: ClusterConfig, node: str, probe: Probe = probe_in_helper) -> None:
        self.cluster = cluster
        self._node = node
        self._probe = probe
        self._written: list[tuple[Mount, Nonce]] = []
        self._unswept: list[tuple[Mount, Nonce]] = []

    def do(self, task: ProbeTask | WriteTask | ReadTask, rank: int) -> Probed | Wrote | Read:
        """Does one task; what fails is in the answer."""
        match task:
            case ProbeTask():
                reports = probe_node(self.cluster, self._node, self._probe)
                return Probed(rank=rank, mounts=reports)
            case WriteTask():
                wrote, problems = self._each(task.mounts, self._write)
                return Wrote(rank=rank, nonces=tuple(wrote.values()), problems=problems)
            case ReadTask():
                written = {found.mount: found for found in task.nonces}
                marks, problems = self._each(
                    written, lambda mount: self._read(mount, written[mount.name])
                )
                return Read(rank=rank, marks=marks, problems=problems)

    def after(self) -> None:
        """Does what nobody waits for: removes what killed handshakes left."""
        in_use_s = 2 * self.cluster.rpc.handshake_timeout_s
        while self._unswept:
            self._quietly(partial(nonce.sweep, *self._unswept.pop(), in_use_s=in_use_s))

    def close(self) -> None:
        """Removes the nonces of this node."""
        while self._written:
            self._quietly(partial(nonce.remove, *self._written.pop(), self._node))

    def _quietly(self, act: Callable[[], object]) -> None:
        with contextlib.suppress(TimeoutError):
            Deadline(self.cluster.rpc.mount_timeout_s).call(act)

    def _each(
        self, names: Container[str], act: Callable[[Mount], T]
    ) -> tuple[dict[str, T], tuple[Problem, ...]]:
        """Acts on mounts at the same time, so that one that hangs costs its own deadline only."""
        results: dict[str, T] = {}
        problems: list[Problem] = []
        with ThreadPoolExecutor(_MOST_AT_ONCE, "mmrpc-mount") as pool:
            futures = [
                (mount, pool.submit(act, mount))
                for mount in MountTable.from_config(self.cluster, self._node)
                if mount.name in names
            ]
        for mount, future in futures:
            error = future.exception()
            if error is None:
                results[mount.name] = future.result()
            elif isinstance(error, Exception):
                problems.append(problem_of(error, mount, self.cluster, self._node))
            else:
                raise error
        return results, tuple(problems)

    def _write(self, mount: Mount) -> Nonce:
        def undo(late: Nonce) -> None:
            nonce.remove(mount, late, self._node)

        written = Deadline(self.cluster.rpc.mount_timeout_s).call(
            lambda: nonce.write(mount, self._node), undo=undo
        )
        self._written.append((mount, written))
        self._unswept.append((mount, written))
        return written

    def _read(self, mount: Mount, written: Nonce) -> FileMark:
        rpc = self.cluster.rpc

        def read() -> FileMark:
            at_once = mount.is_local and file_system_of(mount.root).is_local
            visible_s = 0.0 if at_once else rpc.visibility_timeout_s
            return nonce.read(mount, written, self._node, visible_s=visible_s)

        return Deadline(rpc.mount_timeout_s + rpc.visibility_timeout_s).call(read)
