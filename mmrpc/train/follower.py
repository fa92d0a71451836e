"""`follow`: a module whose weights are the newest complete version that somebody publishes."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final, Self

from mmrpc.core.creation import absolute_path
from mmrpc.errors import PathError, PathNotFoundError
from mmrpc.paths.visibility import until_visible
from mmrpc.train import arguments, attach, leases
from mmrpc.train.version import Announced, Version, announced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

_log = logging.getLogger("mmrpc.train")
_RENEW_S: Final = 30.0
_LONGEST_SLEEP_S: Final = 60.0


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
        verify: bool,
        pre_read: Callable[[str], object] | None,
        poll_s: float,
        visibility_timeout_s: float,
    ) -> None:
        self.current: Version | None = None
        if module is not None:
            attach.specs_of(module)
        arguments.one_of("verify", verify, (True, False))
        self._directory = absolute_path(directory)
        self._module = module
        self._verify, self._pre_read = verify, pre_read
        self._poll_s = arguments.seconds("poll_s", poll_s)
        self._visibility_timeout_s = arguments.seconds("visibility_timeout_s", visibility_timeout_s)
        self._lease: leases.Reader | None = None
        self._may_claim = True
        self._held_number, self._held_s = -1, 0.0
        self._taken: tuple[int, tuple[int, int] | None] = -1, None

    def update(self) -> bool:
        """Takes the newest complete version, if it is another than the present one.

        The module's parameters and buffers become views of it, at no cost but the mapping.
        Call it between uses of the module: what was computed before keeps the old values.

        Returns:
            Whether there was a newer one.

        Raises:
            PathError: If it cannot be read, or has other bytes than were published.
            LayoutError: If it is no version, or of another module.
        """
        while True:
            found = self._announced()
            if found is None or (self.current is not None and self._has(found)):
                self._renew()
                return False
            try:
                version = self._open(found)
                if self._module is not None:
                    version.load_into(self._module)
            except BaseException as error:
                if isinstance(error, PathNotFoundError) and self._announced() != found:
                    continue  # it was replaced and deleted meanwhile: there is a newer one
                self._renew()
                raise
            self.current = version
            return True

    def wait(self, timeout_s: float | None = None) -> Version | None:
        """Waits for a newer version and takes it.

        Returns:
            The version, or None if there was none in time.

        Raises:
            PathError: If it cannot be read, or has other bytes than were published.
            LayoutError: If it is no version, or of another module.
        """
        if timeout_s is not None:
            arguments.seconds("timeout_s", timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.update():
            left_s = _LONGEST_SLEEP_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(self._poll_s, left_s, _LONGEST_SLEEP_S))
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

    def _announced(self) -> Announced | None:
        try:
            return announced(self._directory)
        except PathNotFoundError:
            return None  # the publisher has not made it yet

    def _has(self, found: Announced) -> bool:
        """Whether it has that version, and no other was put under its name in a new training."""
        return found.number == self._taken[0] and _stamp(found.path) in (None, self._taken[1])

    def _open(self, found: Announced) -> Version:
        self._hold(found.number)
        if self._pre_read is not None:
            self._pre_read(found.path)
        # On NFS a new name may be hidden for a while; one that was overtaken is gone for good.
        is_newest = self._announced() == found
        stamp = _stamp(found.path)
        version = until_visible(
            lambda: found.open(verify=self._verify),
            root=self._directory,
            relative=os.path.basename(found.path),
            timeout_s=self._visibility_timeout_s if is_newest else 0.0,
        )
        self._taken = found.number, stamp or _stamp(found.path)
        return version

    def _hold(self, number: int) -> None:
        """Claims a version; where that cannot be written, only the publisher's `keep` protects."""
        if not self._may_claim:
            return
        try:
            if self._lease is None:
                self._lease = leases.Reader(os.path.join(self._directory, leases.DIRECTORY))
            self._lease.hold(number)
            self._held_number, self._held_s = number, time.monotonic()
        except PathError as error:
            self._may_claim = False
            _log.warning("following without a claim: a version can be deleted in use: %s", error)

    def _renew(self) -> None:
        if self.current is None:
            return
        is_other = self._held_number != self.current.number
        if is_other or time.monotonic() - self._held_s > _RENEW_S:
            self._hold(self.current.number)


def _stamp(path: str) -> tuple[int, int] | None:
    """What tells a file from one that got its name later; None if it cannot be seen."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def follow(
    directory: str | os.PathLike[str],
    module: nn.Module | None = None,
    *,
    verify: bool = False,
    pre_read: Callable[[str], object] | None = None,
    poll_s: float = 0.01,
    visibility_timeout_s: float = 60.0,
) -> Follower:
    """Follows the weights that a `Publisher` or a `ParameterServer` publishes in a directory.

    Nothing is copied: all followers of a host map the same pages, and none ever sees half a
    version. The version that one has is not deleted under it.

    Args:
        directory: The publisher's, as this node sees it. It need not exist yet.
        module: A module whose weights become those of each version that is taken.
        verify: Whether to prove, by reading it all, that a version has the bytes that were
            published. The publisher has to be made with ``digest=True``.
        pre_read: Called with the path of a version before it is opened, for file systems that
            need it until they see a new file.
        poll_s: Seconds between looks while waiting.
        visibility_timeout_s: Seconds that a network file system may hide a version that has
            been announced.

    Returns:
        The follower; `Follower.update` takes the newest version, `Follower.wait` waits for it.

    Raises:
        ConfigError: If an argument cannot be.
        UnsupportedTensorError: If the module has tensors that cannot be mapped.
    """
    return Follower(
        directory,
        module,
        verify=verify,
        pre_read=pre_read,
        poll_s=poll_s,
        visibility_timeout_s=visibility_timeout_s,
    )
