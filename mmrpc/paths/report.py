"""What a probe found out about a mount on one node: pure data, as JSON and back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mmrpc import errors

if TYPE_CHECKING:
    from mmrpc.config.models import Reader


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """One mount on one node.

    Attributes:
        mount: Name of the mount.
        node: Name of the node, if it has one.
        path: Where it is there: an absolute path or a URL.
        access: What the config asks for: ``read`` or ``write``.
        file_system: Type of the local file system, such as ``nfs4``; for a remote mount its
            scheme.
        source: What is mounted there: a device, or a server and its directory.
        implementation: Class and version of fsspec's implementation; empty for a local mount.
        reader: How the node reads it.
        exists: Whether it is there.
        readable: Whether it was listed; None if the server shows no listing.
        writable: Whether a file was made in it and removed; None if nobody asked for that.
        free_bytes: Bytes that an ordinary user may still write; None if unknown.
        elapsed_s: Seconds that the probe took.
        error: Name of the class in `mmrpc.errors` of what is wrong; None if nothing is.
        reason: What is wrong, as a clause.
        hint: What to do about it, as a sentence.
    """

    mount: str
    node: str | None
    path: str
    access: str
    file_system: str = "unknown"
    source: str = ""
    implementation: str = ""
    reader: Reader = "mmap"
    exists: bool = False
    readable: bool | None = False
    writable: bool | None = None
    free_bytes: int | None = None
    elapsed_s: float = 0.0
    error: str | None = None
    reason: str | None = None
    hint: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether the node can do with the mount what the config asks for."""
        return self.error is None

    def problem(self) -> errors.PathError | None:
        """Gives what is wrong as the error that it is; None if nothing is."""
        if self.error is None:
            return None
        kind = getattr(errors, self.error, errors.PathError)
        details: dict[str, Any] = {"path": self.path, "mount": self.mount, "node": self.node}
        if kind is errors.MountTimeoutError:
            details["timeout_s"] = self.elapsed_s
        error: errors.PathError = kind(self.reason or "", hint=self.hint, **details)
        return error

    def to_dict(self) -> dict[str, Any]:
        """Gives the fields as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ProbeReport:
        """Reads what `to_dict` gave.

        Raises:
            TypeError: If a field is unknown or missing.
        """
        return cls(**fields)
