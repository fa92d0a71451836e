"""Versions: immutable files of one training state after another, and a pointer to the newest.

A version is written whole, flushed and only then named; then the pointer ``CURRENT`` is renamed
over. Nobody ever sees half a version, whatever is killed when.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mmrpc.core.creation import absolute_path
from mmrpc.core.trees import directory as treedir
from mmrpc.errors import (
    ConfigError,
    LayoutError,
    PathExistsError,
    PathNotFoundError,
    StaleReferenceError,
)
from mmrpc.train import arguments, attach
from mmrpc.train.arena import Arena
from mmrpc.train.leases import Leases

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch
    from torch import nn

    from mmrpc.core.reference import TensorRef

_DIGITS: Final = 12
_NAME: Final = re.compile(rf"v(\d{{{_DIGITS}}})\.safetensors")
_ASIDE: Final = ".retired"
_CURRENT: Final = "CURRENT"
LEASES: Final = "leases"
"""The directory of the readers' leases, in that of the versions."""
_MAX_CURRENT_BYTES: Final = 4096
_VERSION: Final = "version"
_DIGEST: Final = "digest"


@dataclass(frozen=True, slots=True)
class Version:
    """A training state that will not change any more. It pickles as a reference.

    Attributes:
        number: Its number; a server counts its steps.
        arena: Its tensors, mapped copy-on-write.
    """

    number: int
    arena: Arena

    @classmethod
    def open(cls, source: str | os.PathLike[str] | TensorRef) -> Version:
        """Opens a version by its file's name or by its reference.

        Raises:
            LayoutError: If it is no whole version.
            PathError: If it cannot be read.
        """
        from mmrpc.core.reference import TensorRef

        arena = Arena(source.open()) if isinstance(source, TensorRef) else Arena.open(source)
        number = arena.table.metadata.get(_VERSION, "")
        if not re.fullmatch(rf"\d{{1,{_DIGITS}}}", number, re.ASCII):
            where = arena.data.filename or "it"
            raise LayoutError(f"{where!r} has no version in its header: it is of something else")
        return cls(int(number), arena)

    @property
    def digest(self) -> str | None:
        """``sha256:...`` of its tensors, with their names; None if it was published without."""
        return self.arena.table.metadata.get(_DIGEST)

    def verify(self) -> None:
        """Proves that it has the bytes that were published, by reading all of them.

        Raises:
            StaleReferenceError: If it has others.
            LayoutError: If it was published without a digest.
        """
        path = self.filename
        if self.digest is None:
            raise LayoutError(
                f"{path!r} has no digest", hint="Make the publisher with digest=True."
            )
        found = self.arena.digest()
        if found != self.digest:
            raise StaleReferenceError(
                f"its bytes have {found}, and {self.digest} was published", path=path
            )

    def ref(self) -> TensorRef:
        """A reference to it, which JSON can hold: all that a checkpoint has to be."""
        return self.arena.data.ref()

    @property
    def filename(self) -> str:
        """Absolute path of its file, which is a ``.safetensors`` file."""
        return self.arena.data.filename

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The module's tensors by name, as in its state dict; tied ones are there once."""
        return {
            name: tensor
            for name, tensor in self.arena.tensors.items()
            if not name.startswith(attach.OPTIMIZER_PREFIX)
        }

    def load_into(self, module: nn.Module) -> None:
        """Makes a module's parameters and buffers views of this version, without a copy.

        Raises:
            LayoutError: If the module has other tensors.
        """
        expected = {n: s for n, s in self.arena.table.specs().items() if n in self.tensors}
        attach.check_same(expected, attach.specs_of(module), "the module")
        attach.point(module, self.tensors)


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
        self._leases = Leases(
            os.path.join(self.directory, LEASES), arguments.seconds("lease_ttl_s", lease_ttl_s)
        )
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
            self._point_to(version)
            return version
        metadata = {_VERSION: str(number)}
        if self._digest:
            metadata[_DIGEST] = arena.digest()
        # What is there was left by one who was killed.
        arena.write_copy(path, metadata, durable=self._durable, existsok=exists)
        try:
            if post_write is not None:
                post_write(path)
            version = Version.open(path)
            self._point_to(version)
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

    def _point_to(self, version: Version) -> None:
        """Makes a version the newest for those who follow."""
        document = {_VERSION: version.number, "file": os.path.basename(version.filename)}
        if version.digest is not None:
            document[_DIGEST] = version.digest
        path = os.path.join(self.directory, _CURRENT)
        treedir.write_small(path, json.dumps(document).encode(), durable=self._durable)

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
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.path(number), self.path(number) + _ASIDE)
        return self._delete_aside(set(in_use))

    def _delete_aside(self, in_use: set[int]) -> list[int]:
        aside = [n for n in os.listdir(self.directory) if n.endswith(_ASIDE)]
        held = in_use | set(self.readers().values()) if aside else set()
        gone = []
        for name in aside:
            match = _NAME.match(name)
            if match and int(match[1]) not in held:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.directory, name))
                gone.append(int(match[1]))
        return sorted(gone)

    def readers(self) -> dict[str, int]:
        """Which version each living reader holds."""
        return self._leases.held()

    def numbers(self) -> list[int]:
        """Numbers of the versions that are there and whole, the oldest first."""
        found = (_NAME.fullmatch(name) for name in os.listdir(self.directory))
        return sorted(int(match[1]) for match in found if match)

    def path(self, number: int) -> str:
        """Absolute path of a version's file.

        Raises:
            ConfigError: If there is no such number.
        """
        if arguments.whole_number("version", number, 0) >= 10**_DIGITS:
            raise ConfigError(f"{number} has more than {_DIGITS} digits", key="version")
        return os.path.join(self.directory, f"v{number:0{_DIGITS}d}.safetensors")

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
            return _open_numbered(numbers[-1], self.path(numbers[-1]))
        except LayoutError as error:
            raise LayoutError(
                error.reason, hint="Move it away to go on from the version before."
            ) from None


class Announced(NamedTuple):
    """What a directory's pointer says.

    Attributes:
        number: Number of the version.
        path: Path of its file.
        digest: Its digest, if it was published with one.
    """

    number: int
    path: str
    digest: str | None

    def open(self, *, verify: bool = False) -> Version:
        """Opens the version that is meant.

        Args:
            verify: Whether to read it all, to prove that it has the bytes that were announced.

        Raises:
            LayoutError: If the file is no such version, or has no digest to verify.
            StaleReferenceError: If it has other bytes.
            PathError: If it cannot be read.
        """
        version = _open_numbered(self.number, self.path)
        if version.digest != self.digest:
            raise StaleReferenceError(
                f"it has {version.digest}, and {self.digest} was announced", path=self.path
            )
        if verify:
            version.verify()
        return version


def announced(directory: str) -> Announced | None:
    """The version that a directory points to; None if there is none yet.

    Raises:
        PathError: If the directory or the pointer cannot be read.
        LayoutError: If the pointer is none.
    """
    path = os.path.join(directory, _CURRENT)
    try:
        document: Any = json.loads(treedir.read_small(path, _MAX_CURRENT_BYTES))
        number, name = document[_VERSION], document["file"]
        digest = document.get(_DIGEST)
        match = _NAME.fullmatch(name)
    except PathNotFoundError:
        if not os.path.isdir(directory):
            raise PathNotFoundError("no such directory", path=directory) from None
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, LayoutError):
            raise
        raise LayoutError(f"{path!r} does not name a version") from None
    if match is None or type(number) is not int or int(match[1]) != number:
        raise LayoutError(f"{path!r} does not name a version")
    if not isinstance(digest, str | None):
        raise LayoutError(f"{path!r} does not name a version")
    return Announced(number, os.path.join(directory, name), digest)


def latest(directory: str | os.PathLike[str], *, verify: bool = False) -> Version | None:
    """Opens the newest announced version in a directory, whole; None if there is none yet.

    Args:
        directory: The directory of a publisher or server.
        verify: Whether to prove that it has the bytes that were published; see `Version.verify`.

    Raises:
        PathError: If it cannot be read.
        LayoutError: If what is there is no version.
        StaleReferenceError: If it has other bytes than were announced.
    """
    path = absolute_path(directory)
    while True:
        found = announced(path)
        if found is None:
            return None
        try:
            return found.open(verify=verify)
        except PathNotFoundError:
            if announced(path) == found:  # else it was replaced meanwhile
                raise


def _open_numbered(number: int, path: str) -> Version:
    version = Version.open(path)
    if version.number != number:
        raise LayoutError(f"{path!r} is version {version.number}: it was renamed")
    return version


def _make_directories(path: str) -> None:
    if "\0" in path:
        raise PathNotFoundError("it has a NUL character", path=path)
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        treedir.make_directory(directory)
