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
from typing import TYPE_CHECKING, Final

from mmrpc.core.creation import absolute_path
from mmrpc.errors import LayoutError, PathError, PathExistsError, PathNotFoundError
from mmrpc.train import leases
from mmrpc.train.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch
    from torch import nn

    from mmrpc.core.reference import TensorRef

_NAME: Final = re.compile(r"v(\d{12})\.safetensors")
_ASIDE: Final = ".retired"
_CURRENT: Final = "CURRENT"
OPTIMIZER_PREFIX: Final = "optim/"
"""What the names of an optimizer's tensors start with; all others are the module's."""


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
        try:
            return cls(int(arena.table.metadata["version"]), arena)
        except (KeyError, ValueError):
            raise LayoutError("its header has no version: it is a file of something else") from None

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
            if not name.startswith(OPTIMIZER_PREFIX)
        }

    def load_into(self, module: nn.Module) -> None:
        """Makes a module's parameters and buffers views of this version, without a copy.

        Raises:
            LayoutError: If the module has other tensors.
        """
        from mmrpc.train import attach

        expected = {n: s for n, s in self.arena.table.specs().items() if n in self.tensors}
        attach.check_same(expected, attach.specs_of(module), "the module")
        attach.point(module, self.tensors)


class Versions:
    """The versions in one directory, which one process writes and any may read.

    Args:
        directory: Where they are; made if missing. Its files belong to this object.
        keep: How many of the newest stay, whoever reads them.
        durable: Whether a version is on the device before it is announced.
        lease_ttl_s: Seconds that a reader on another host holds a version without renewing it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        durable: bool = True,
        lease_ttl_s: float = 300.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.directory = absolute_path(directory)
        self._keep, self._durable, self._lease_ttl_s = keep, durable, lease_ttl_s
        _make_directory(self.directory)

    @property
    def lease_directory(self) -> str:
        """Where its readers' leases are."""
        return os.path.join(self.directory, "leases")

    def publish(self, number: int, arena: Arena, metadata: Mapping[str, str]) -> Version:
        """Writes the present values of an arena as a version, and then points to it.

        It may be called again for a number that a killed or failed call has left.

        Raises:
            NoSpaceError: If there is too little space; the version before stays the newest.
            PathError: If it cannot be written.
        """
        path = self.path(number)
        with contextlib.suppress(PathExistsError):
            arena.write_copy(path, {**metadata, "version": str(number)}, durable=self._durable)
        self.point_to(number)
        return Version.open(path)

    def point_to(self, number: int) -> None:
        """Makes an existing version the newest for those who follow."""
        document = {"version": number, "file": os.path.basename(self.path(number))}
        path = os.path.join(self.directory, _CURRENT)
        leases.write_text(path, json.dumps(document), durable=self._durable)

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
        return leases.held(self.lease_directory, self._lease_ttl_s)

    def numbers(self) -> list[int]:
        """Numbers of the versions that are there and whole, the oldest first."""
        found = (_NAME.fullmatch(name) for name in os.listdir(self.directory))
        return sorted(int(match[1]) for match in found if match)

    def path(self, number: int) -> str:
        """Absolute path of a version's file."""
        return os.path.join(self.directory, f"v{number:012d}.safetensors")

    def newest(self) -> Version | None:
        """Opens the version with the highest number, announced or not; None if there is none."""
        numbers = self.numbers()
        return Version.open(self.path(numbers[-1])) if numbers else None


def announced(directory: str) -> tuple[int, str] | None:
    """Number and path of the version that a directory points to; None if there is none yet.

    Raises:
        PathError: If the directory or the pointer cannot be read.
        LayoutError: If the pointer is none.
    """
    path = os.path.join(directory, _CURRENT)
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        number, name = document["version"], document["file"]
    except FileNotFoundError:
        if not os.path.isdir(directory):
            raise PathNotFoundError("no such directory", path=directory) from None
        return None
    except OSError as error:
        raise PathError((error.strerror or str(error)).lower(), path=path) from None
    except (ValueError, KeyError, TypeError):
        raise LayoutError(f"{path!r} does not name a version") from None
    if not isinstance(number, int) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise LayoutError(f"{path!r} does not name a version")
    return number, os.path.join(directory, name)


def latest(directory: str | os.PathLike[str]) -> Version | None:
    """Opens the newest announced version in a directory, whole; None if there is none yet.

    Raises:
        PathError: If it cannot be read.
        LayoutError: If what is there is no version.
    """
    path = absolute_path(directory)
    while True:
        found = announced(path)
        if found is None:
            return None
        try:
            return Version.open(found[1])
        except PathNotFoundError:
            if announced(path) == found:  # else it was replaced meanwhile
                raise


def _make_directory(path: str) -> None:
    from mmrpc.core import files

    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise files.path_error(error, path, writing=True) from None
