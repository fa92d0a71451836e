"""`Publisher`: one learner's weights, for any number of actors that follow them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mmrpc.errors import LayoutError
from mmrpc.train import attach
from mmrpc.train.arena import Arena
from mmrpc.train.versions import Version, Versions

if TYPE_CHECKING:
    import os

    from torch import nn

_LOOK_AGAIN_S = 0.01


class Publisher:
    """Publishes a module's weights, version after version, in a directory.

    Each version is a ``.safetensors`` file that is written whole, flushed, named, and only then
    announced; it never changes, and stays while a follower holds it. A publisher that is started
    again goes on counting.

    Args:
        module: The module, on the CPU; it is only read.
        directory: Where the versions are; made if missing. One publisher may write to it.
        keep: How many of the newest versions stay, whoever follows.
        durable: Whether a version is on the device before it is announced. Followers on other
            hosts need it.
        lease_ttl_s: Seconds that a follower on another host, which cannot be seen to be alive,
            holds a version without looking for a newer one.

    Raises:
        UnsupportedTensorError: If the module has tensors that cannot be mapped.
        LayoutError: If the directory has versions of another module.
        PathError: If the directory cannot be used.
    """

    def __init__(
        self,
        module: nn.Module,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        durable: bool = True,
        lease_ttl_s: float = 300.0,
    ) -> None:
        self.module = module
        self._versions = Versions(directory, keep=keep, durable=durable, lease_ttl_s=lease_ttl_s)
        self.directory = self._versions.directory
        specs = attach.specs_of(module)
        newest = self._versions.newest()
        if newest is not None:
            found = newest.arena.table.specs()
            attach.check_same(specs, found, f"the version in {newest.filename!r}")
        self.version = newest.number if newest is not None else None
        self._arena = Arena.create(specs, filename=None)

    def publish(self, version: int | None = None) -> Version:
        """Publishes the present weights.

        Args:
            version: Its number, such as the training step; it must grow. Defaults to the next.

        Returns:
            The version; sent by RPC it is a reference of a few hundred bytes.

        Raises:
            LayoutError: If the number does not grow.
            NoSpaceError: If there is too little space; followers keep the version before.
        """
        number = self._next() if version is None else version
        if self.version is not None and number <= self.version:
            raise LayoutError(f"version {number} does not come after version {self.version}")
        for name, tensor in attach.tensors_of(self.module).items():
            self._arena.tensors[name].copy_(tensor.detach())
        published = self._versions.publish(number, self._arena, {})
        self.version = number
        self._versions.retire()
        return published

    def followers(self) -> dict[str, int]:
        """Which version each living follower has."""
        return self._versions.readers()

    def wait_for_followers(self, count: int, timeout_s: float | None = None) -> bool:
        """Waits until so many followers have the newest version, or a newer one.

        Returns:
            Whether they had it in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            newest = -1 if self.version is None else self.version
            if sum(number >= newest for number in self.followers().values()) >= count:
                return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_AGAIN_S)

    def _next(self) -> int:
        return 0 if self.version is None else self.version + 1
