"""`follow`: a module whose weights are the newest complete version that somebody publishes."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Self

from mmrpc.core.creation import absolute_path
from mmrpc.errors import PathNotFoundError, PathNotWritableError
from mmrpc.paths.visibility import until_visible
from mmrpc.train import leases
from mmrpc.train.versions import Version, announced

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch import nn

_log = logging.getLogger("mmrpc.train")
_RENEW_S = 30.0


class Follower:
    """Follows the versions in a directory; see `follow`.

    Attributes:
        current: The version that it has; None before the first.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        module: nn.Module | None,
        *,
        poll_s: float,
        visibility_timeout_s: float,
    ) -> None:
        self.current: Version | None = None
        self._directory = absolute_path(directory)
        self._module = module
        self._poll_s, self._visibility_timeout_s = poll_s, visibility_timeout_s
        self._lease: leases.Reader | None = None
        self._may_claim = True
        self._held_s = 0.0

    def update(self) -> bool:
        """Takes the newest complete version, if it is another than the present one.

        The module's parameters and buffers become views of it, at no cost but the mapping.
        Call it between uses of the module: what was computed before keeps the old values.

        Returns:
            Whether there was a newer one.

        Raises:
            PathError: If it cannot be read.
            LayoutError: If it is no version, or of another module.
        """
        while True:
            found = self._announced()
            if found is None or (self.current is not None and found[0] == self.current.number):
                self._renew()
                return False
            try:
                version = self._open(*found)
            except PathNotFoundError:
                if self._announced() == found:
                    raise
                continue  # it was replaced and deleted meanwhile: there is a newer one
            if self._module is not None:
                version.load_into(self._module)
            self.current = version
            return True

    def wait(self, timeout_s: float | None = None) -> Version | None:
        """Waits for a newer version and takes it.

        Returns:
            The version, or None if there was none in time.

        Raises:
            PathError: If it cannot be read.
            LayoutError: If it is no version, or of another module.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.update():
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(self._poll_s)
        return self.current

    def __iter__(self) -> Iterator[Version]:
        """Waits for one version after another; those that are overtaken are left out."""
        while True:
            version = self.wait()
            if version is not None:
                yield version

    def close(self) -> None:
        """Gives up its claim on the version that it has; the module keeps it, on this host."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _announced(self) -> tuple[int, str] | None:
        try:
            return announced(self._directory)
        except PathNotFoundError:
            return None  # the publisher has not made it yet

    def _open(self, number: int, path: str) -> Version:
        self._hold(number)
        relative = path.removeprefix(self._directory).lstrip("/")
        seen = self._announced()

        def find() -> Version:
            return Version.open(path)

        # On NFS a new name may be hidden for a while; one that was overtaken is gone for good.
        still_newest = seen is not None and seen[0] == number
        return until_visible(
            find,
            root=self._directory,
            relative=relative,
            timeout_s=self._visibility_timeout_s if still_newest else 0.0,
        )

    def _hold(self, number: int) -> None:
        """Claims a version; where that cannot be written, only the publisher's `keep` protects."""
        if not self._may_claim:
            return
        try:
            if self._lease is None:
                self._lease = leases.Reader(f"{self._directory}/leases")
            self._lease.hold(number)
            self._held_s = time.monotonic()
        except PathNotWritableError as error:
            self._may_claim = False
            _log.warning("following without a claim: a version can be deleted in use: %s", error)

    def _renew(self) -> None:
        if self.current is not None and time.monotonic() - self._held_s > _RENEW_S:
            self._hold(self.current.number)


def follow(
    directory: str | os.PathLike[str],
    module: nn.Module | None = None,
    *,
    poll_s: float = 0.01,
    visibility_timeout_s: float = 60.0,
) -> Follower:
    """Follows the weights that a `Publisher` or a `ParameterServer` publishes in a directory.

    Nothing is copied: all followers of a host map the same pages, and none ever sees half a
    version. The version that one has is not deleted under it.

    Args:
        directory: The publisher's, as this node sees it. It need not exist yet.
        module: A module whose weights become those of each version that is taken.
        poll_s: Seconds between looks while waiting.
        visibility_timeout_s: Seconds that a network file system may hide a version that has
            been announced.

    Returns:
        The follower; `Follower.update` takes the newest version, `Follower.wait` waits for it.
    """
    return Follower(directory, module, poll_s=poll_s, visibility_timeout_s=visibility_timeout_s)
