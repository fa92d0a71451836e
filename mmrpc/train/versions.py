"""`Versions`: the versions in a directory, as their one writer makes and deletes them."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from mmrpc.core import files
from mmrpc.core.creation import absolute_path
from mmrpc.core.trees import directory as treedir
from mmrpc.errors import ConfigError, LayoutError, PathExistsError, PathNotFoundError
from mmrpc.train import arguments, leases
from mmrpc.train.version import (
    DIGITS,
    Version,
    announce,
    announced,
    file_name,
    header_of,
    number_of,
    open_numbered,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from mmrpc.train.arena import Arena

_ASIDE: Final = ".retired"


class Versions:
    """The versions in one directory, which one process writes and any may read.

    Args:
        directory: Where they are; made if missing. Its files belong to this object.
        keep: How many of the newest stay, whoever reads them.
        durable: Whether a version is on the device before it is announced.
        digest: Whether a version has the digest of its bytes.
        lease_ttl_s: Seconds that a reader on another host holds a version without renewing it.

    Raises:
        ConfigError: If an argument cannot be.
        PathError: If the directory cannot be made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        durable: bool = True,
        digest: bool = False,
        lease_ttl_s: float = 300.0,
    ) -> None:
        self._keep = arguments.whole_number("keep", keep, 1)
        arguments.one_of("durable", durable, (True, False))
        arguments.one_of("digest", digest, (True, False))
        self._durable, self._digest = durable, digest
        self.directory = absolute_path(directory, writing=True)
        ttl_s = arguments.seconds("lease_ttl_s", lease_ttl_s)
        self._leases = leases.Leases(os.path.join(self.directory, leases.DIRECTORY), ttl_s)
        _make_directories(self.directory)

    def publish(
        self, number: int, arena: Arena, *, post_write: Callable[[str], object] | None = None
    ) -> Version:
        """Writes the present values of an arena as a version, and then points to it.

        It may be called again for a number that a killed or failed call has left.

        Args:
            number: The number of the version.
            arena: What to write.
            post_write: Called with the path of the file before anybody is told of it.

        Raises:
            ConfigError: If there is no such number.
            PathExistsError: If others have published other values under it.
            NoSpaceError: If there is too little space; the version before stays the newest.
            PathError: If it cannot be written.
        """
        path = self.path(number)
        exists = os.path.lexists(path)
        if exists and number <= self._announced_number():
            version = Version.open(path)
            if not version.arena.has_same_values(arena):
                raise PathExistsError(
                    "it was published with other values",
                    path=path,
                    hint="Give each training a directory of its own.",
                )
            announce(self.directory, version, durable=self._durable)
            return version
        header = header_of(number, arena.digest() if self._digest else None)
        # What is there was left by one who was killed.
        arena.write_copy(path, header, durable=self._durable, existsok=exists)
        try:
            if post_write is not None:
                post_write(path)
            version = Version.open(path)
            announce(self.directory, version, durable=self._durable)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return version

    def _announced_number(self) -> int:
        try:
            found = announced(self.directory)
        except LayoutError:
            return -1  # it is written anew now
        return -1 if found is None else found.number

    def retire(self, in_use: Collection[int] = ()) -> list[int]:
        """Deletes the versions that are neither among the newest nor in use.

        Args:
            in_use: Numbers that are in use besides those under lease.

        Returns:
            The numbers that are gone.
        """
        numbers = self.numbers()
        old = [n for n in numbers[: -self._keep] if n not in set(in_use)]
        # A lease may come between looking and deleting: so nobody can open it when we look last.
        held = set(self.readers().values()) if old else set()
        for number in old:
            if number not in held:
                with contextlib.suppress(OSError):
                    os.rename(self.path(number), self.path(number) + _ASIDE)
        return self._delete_aside(set(in_use))

    def _delete_aside(self, in_use: set[int]) -> list[int]:
        aside = [name for name in self._names() if name.endswith(_ASIDE)]
        held = in_use | set(self.readers().values()) if aside else set()
        gone = []
        for name in aside:
            number = number_of(name.removesuffix(_ASIDE))
            if number is not None and number not in held:
                with contextlib.suppress(OSError):  # it is tried again at the next
                    os.unlink(os.path.join(self.directory, name))
                    gone.append(number)
        return sorted(gone)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.directory)
        except OSError as error:
            raise files.path_error(error, self.directory) from None

    def readers(self) -> dict[str, int]:
        """Which version each living reader holds."""
        return self._leases.held()

    def numbers(self) -> list[int]:
        """Numbers of the versions that are there and whole, the oldest first.

        Raises:
            PathError: If the directory cannot be read.
        """
        found = (number_of(name) for name in self._names())
        return sorted(number for number in found if number is not None)

    def path(self, number: int) -> str:
        """Absolute path of a version's file.

        Raises:
            ConfigError: If there is no such number.
        """
        if arguments.whole_number("version", number, 0) >= 10**DIGITS:
            raise ConfigError(f"{number} has more than {DIGITS} digits", key="version")
        return os.path.join(self.directory, file_name(number))

    def newest(self) -> Version | None:
        """Opens the version with the highest number, announced or not; None if there is none.

        Raises:
            LayoutError: If it is not whole: it was not written by us, or changed since.
            PathError: If it cannot be read.
        """
        numbers = self.numbers()
        if not numbers:
            return None
        try:
            return open_numbered(numbers[-1], self.path(numbers[-1]))
        except LayoutError as error:
            raise LayoutError(
                error.reason, hint="Move it away to go on from the version before."
            ) from None


def _make_directories(path: str) -> None:
    if "\0" in path:
        raise PathNotFoundError("it has a NUL character", path=path)
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        treedir.make_directory(directory)
