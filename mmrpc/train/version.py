"""A version: one immutable file of a training state, and the pointer to the newest of a directory.

A version is written whole, flushed and only then named; then the pointer ``CURRENT`` is renamed
over. Nobody ever sees half a version, whatever is killed when.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mmrpc.core.creation import absolute_path
from mmrpc.core.trees import directory as treedir
from mmrpc.errors import LayoutError, PathNotFoundError, StaleReferenceError
from mmrpc.train import attach
from mmrpc.train.arena import Arena

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mmrpc.core.reference import TensorRef

DIGITS: Final = 12
"""How many digits a version's number has in the name of its file."""
_NAME: Final = re.compile(rf"v(\d{{{DIGITS}}})\.safetensors")
_CURRENT: Final = "CURRENT"
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
        if not re.fullmatch(rf"\d{{1,{DIGITS}}}", number, re.ASCII):
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


def file_name(number: int) -> str:
    """Name of a version's file in its directory."""
    return f"v{number:0{DIGITS}d}.safetensors"


def number_of(name: str) -> int | None:
    """Number of the version whose file has a name; None if it is the name of something else."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def header_of(number: int, digest: str | None) -> dict[str, str]:
    """What the header of a version's file says about it."""
    return {_VERSION: str(number)} | ({} if digest is None else {_DIGEST: digest})


def announce(directory: str, version: Version, *, durable: bool) -> None:
    """Makes a version the newest for those who follow.

    Raises:
        NoSpaceError: If there is too little space; the one before stays the newest.
        PathError: If the pointer cannot be written.
    """
    document = {_VERSION: version.number, "file": os.path.basename(version.filename)}
    if version.digest is not None:
        document[_DIGEST] = version.digest
    path = os.path.join(directory, _CURRENT)
    treedir.write_small(path, json.dumps(document).encode(), durable=durable)


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
        version = open_numbered(self.number, self.path)
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
        named = number_of(name)
    except PathNotFoundError:
        if not os.path.isdir(directory):
            raise PathNotFoundError("no such directory", path=directory) from None
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, LayoutError):
            raise
        raise LayoutError(f"{path!r} does not name a version") from None
    if type(number) is not int or named != number or not isinstance(digest, str | None):
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


def open_numbered(number: int, path: str) -> Version:
    """Opens a version by its file's name, which says its number.

    Raises:
        LayoutError: If it is no whole version, or has another number.
        PathError: If it cannot be read.
    """
    version = Version.open(path)
    if version.number != number:
        raise LayoutError(f"{path!r} is version {version.number}: it was renamed")
    return version
