"""Look at and open files of a node's local mounts, with deadlines where they may not answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mmrpc.errors import MountTimeoutError
from mmrpc.paths.beneath import look_beneath, open_beneath
from mmrpc.paths.deadline import Deadline
from mmrpc.paths.fstype import FileSystem, file_system_of
from mmrpc.paths.visibility import until_visible

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmrpc.config.models import RpcConfig
    from mmrpc.paths.mounts import Mount
    from mmrpc.paths.verify import Verify

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Policy:
    """What a node does about references; the fields are those of `mmrpc.config.RpcConfig`."""

    verify: Verify = "stat"
    same_host_paths: bool = True
    mount_timeout_s: float = 10.0
    visibility_timeout_s: float = 30.0

    @classmethod
    def from_config(cls, rpc: RpcConfig) -> Policy:
        """Takes the fields from a config."""
        return cls(rpc.verify, rpc.same_host_paths, rpc.mount_timeout_s, rpc.visibility_timeout_s)


class MountAccess:
    """The local mounts of this node, as files are looked up in them.

    Args:
        policy: How long to wait.
        node: Name of this node, for errors.
    """

    def __init__(self, policy: Policy, *, node: str | None = None) -> None:
        self._policy = policy
        self._node = node
        self._deadlines: dict[str, Deadline] = {}
        self._file_systems: dict[str, FileSystem] = {}

    def file_system(self, mount: Mount) -> FileSystem:
        """Says what kind of file system a local mount is on.

        Raises:
            MountTimeoutError: If it does not answer.
        """
        known = self._file_systems.get(mount.name)
        if known is None:
            known = self._within(mount, lambda: file_system_of(mount.root))
            self._file_systems[mount.name] = known
        return known

    def look(self, mount: Mount, relative: str) -> int:
        """Finds a file; see `mmrpc.paths.beneath.look_beneath`."""

        def find() -> int:
            return look_beneath(mount.root, relative, mount=mount.name, node=self._node)

        return self._answered(mount, find)

    def open(self, mount: Mount, relative: str, *, writable: bool, is_foreign: bool) -> int:
        """Opens a file; see `mmrpc.paths.beneath.open_beneath`.

        Args:
            mount: A local mount.
            relative: Path in it, from an untrusted source.
            writable: Whether to open it for reading and writing.
            is_foreign: Whether another host made it: then it may be seen late only, and must be
                on the file system that was proven, not on one mounted below.
        """

        def find() -> int:
            return open_beneath(
                mount.root,
                relative,
                writable=writable,
                same_file_system=is_foreign,
                mount=mount.name,
                node=self._node,
            )

        can_lag = is_foreign and not self.file_system(mount).is_local
        return until_visible(
            lambda: self._answered(mount, find),
            root=mount.root,
            relative=relative,
            timeout_s=self._policy.visibility_timeout_s if can_lag else 0.0,
        )

    def _answered(self, mount: Mount, find: Callable[[], int]) -> int:
        """Calls what opens a file; in another thread, with a deadline, if it could hang."""
        if self.file_system(mount).is_local:
            return find()
        return self._within(mount, find, undo=os.close)

    def _within(
        self, mount: Mount, call: Callable[[], T], undo: Callable[[T], object] | None = None
    ) -> T:
        deadline = self._deadlines.get(mount.name)
        if deadline is None:
            deadline = self._deadlines[mount.name] = Deadline(self._policy.mount_timeout_s)
        try:
            return deadline.call(call, undo=undo)
        except TimeoutError as error:
            if isinstance(error, MountTimeoutError):
                raise
            raise MountTimeoutError(
                str(error),
                path=mount.root,
                mount=mount.name,
                node=self._node,
                hint="Is the server up? The limit is rpc.mount_timeout_s.",
                timeout_s=self._policy.mount_timeout_s,
            ) from None
