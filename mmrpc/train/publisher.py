"""`Publisher`: one learner's weights, for any number of actors that follow them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from mmrpc.errors import LayoutError, MmrpcError
from mmrpc.train import arguments, attach, locking
from mmrpc.train.arena import Arena
from mmrpc.train.versions import Versions

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch import nn

    from mmrpc.train.version import Version

_LOOK_AGAIN_S = 0.01


class Publisher:
    """Publishes a module's weights, version after version, in a directory.

    Each version is a ``.safetensors`` file that is written whole, flushed, named, and only then
    announced; it never changes, and stays while a follower holds it. A publisher that is started
    again goes on counting.

    Args:
        module: The module, on the CPU; it is only read.
        directory: Where the versions are; made if missing. One publisher may write to it, until
            it is closed or its process ends.
        keep: How many of the newest versions stay, whoever follows.
        durable: Whether a version is on the device before it is announced. Followers on other
            hosts need it.
        digest: Whether versions have the SHA-256 of their bytes, with which followers can prove
            that they have them. It takes about 0.6 s for each GB.
        post_write: Called with the path of each version before it is announced, for file systems
            that need more than a flush until others see a file.
        lease_ttl_s: Seconds that a follower on another host, which cannot be seen to be alive,
            holds a version without looking for a newer one.

    Attributes:
        module: The module.
        directory: Its absolute path.
        version: Number of the newest version; None before the first.

    Raises:
        ConfigError: If an argument cannot be.
        UnsupportedTensorError: If the module has tensors that cannot be mapped.
        LayoutError: If the directory has versions of another module.
        PathExistsError: If another publisher or a server writes there.
        PathError: If the directory cannot be used.
        NoSpaceError: If there is too little memory for a copy of the weights.
    """

    def __init__(
        self,
        module: nn.Module,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        durable: bool = True,
        digest: bool = False,
        post_write: Callable[[str], object] | None = None,
        lease_ttl_s: float = 300.0,
    ) -> None:
        self._specs = attach.specs_of(module)
        self.module = module
        self._post_write = post_write
        self._versions = Versions(
            directory, keep=keep, durable=durable, digest=digest, lease_ttl_s=lease_ttl_s
        )
        self.directory = self._versions.directory
        self._lock = locking.lock(self.directory)
        try:
            newest = self._versions.newest()
            if newest is not None:
                found = newest.arena.table.specs()
                attach.check_same(self._specs, found, f"the version in {newest.filename!r}")
            self.version = newest.number if newest is not None else None
            self._arena = Arena.create(self._specs, filename=None)
        except BaseException:
            self._lock.release()
            raise

    def publish(self, version: int | None = None) -> Version:
        """Publishes the present weights.

        Args:
            version: Its number, such as the training step; it must grow. Defaults to the next.

        Returns:
            The version; sent by RPC it is a reference of a few hundred bytes.

        Raises:
            LayoutError: If the number does not grow, or the module has got other tensors.
            NoSpaceError: If there is too little space; followers keep the version before.
            MmrpcError: If the publisher was closed.
        """
        if not self._lock.is_locked:
            raise MmrpcError("the publisher was closed, or is of another process")
        number = self._next() if version is None else version
        self._versions.path(number)  # it checks the number
        if self.version is not None and number <= self.version:
            raise LayoutError(f"version {number} does not come after version {self.version}")
        attach.check_same(self._specs, attach.specs_of(self.module), "the module now")
        for name, tensor in attach.tensors_of(self.module).items():
            self._arena.tensors[name].copy_(tensor.detach())
        published = self._versions.publish(number, self._arena, post_write=self._post_write)
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

        Raises:
            ConfigError: If an argument cannot be.
        """
        arguments.whole_number("count", count, 0)
        if timeout_s is not None:
            arguments.seconds("timeout_s", timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            newest = -1 if self.version is None else self.version
            if sum(number >= newest for number in self.followers().values()) >= count:
                return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_AGAIN_S)

    def close(self) -> None:
        """Lets another publisher write to the directory; followers keep what there is."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> int:
        return 0 if self.version is None else self.version + 1
