"""Every error that a user of mmrpc can catch.

    MmrpcError                       also RuntimeError
    ├── ConfigError                  also ValueError: a config file or value is wrong
    ├── LayoutError                  also ValueError: a dtype, shape, stride or offset cannot be
    │   └── UnsupportedTensorError   also NotImplementedError: sparse, quantized, meta, jagged
    ├── PathError                    a path or a memory location on a node
    │   ├── PathNotFoundError        also FileNotFoundError
    │   ├── PathExistsError          also FileExistsError: the name is taken
    │   ├── PathNotReadableError     also PermissionError
    │   ├── PathNotWritableError     also PermissionError
    │   ├── NotRegularFileError      also OSError: a symlink, directory, FIFO, socket or device
    │   ├── FileTooShortError        also EOFError: fewer bytes than the tensor needs
    │   ├── StaleReferenceError      the file or memory is no longer the one that was meant
    │   ├── NotSharedError           the other node cannot have what this one holds
    │   ├── OutsideMountsError       also PermissionError: the path is in no mount of the node
    │   ├── NoSpaceError             also OSError: the space could not be reserved
    │   └── MountTimeoutError        also TimeoutError: a file system did not answer
    ├── HandshakeError               workers are absent, or did not prove what the config asks for
    ├── RpcError                     a remote call
    │   ├── RpcTimeoutError          also TimeoutError
    │   ├── PeerLostError            also ConnectionError: the peer died or cannot be reached
    │   └── RemoteError              the peer raised what cannot travel; its type and text can
    └── LaunchError                  a worker or an agent could not start, or failed

An error is one sentence: where, what, why and what to do. The parts are attributes too, and
they survive pickling, so the node that asked sees what the node that failed saw.
"""

from __future__ import annotations

import errno as _errno
from typing import Any, ClassVar, Final

_LONG_FIELDS: Final = ("reason", "hint", "problems", "traceback")
"""What a repr has in its place, or leaves to `str` and the attributes."""


class MmrpcError(RuntimeError):
    """Base of all errors of mmrpc.

    Args:
        reason: What is wrong, as a clause that can follow a colon.
        node: The node (or worker) on which it happened, if known.
        hint: What to do about it, as a sentence.
        **details: Further attributes; each subclass names its own in ``fields``.

    Attributes:
        reason: See ``Args``.
        node: See ``Args``.
        hint: See ``Args``.
    """

    fields: ClassVar[tuple[str, ...]] = ("reason", "node", "hint")
    """The attributes that make up the error; they travel when it is pickled."""

    reason: str
    node: str | None
    hint: str | None

    def __init__(
        self,
        reason: str = "",
        *,
        node: str | None = None,
        hint: str | None = None,
        **details: Any,
    ) -> None:
        unknown = set(details) - set(self.fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no attribute {sorted(unknown)[0]!r}")
        # One argument, so that OSError (a base of some of us) does not parse an errno out of it.
        super().__init__(reason)
        for name in self.fields:
            # `errno` and `filename` are slots of OSError with a meaning of their own.
            setattr(self, name, details.get(name))
        self.reason, self.node, self.hint = reason, node, hint

    def _subject(self) -> str:
        """What the sentence is about, without the reason."""
        return f"on {self.node}" if self.node else ""

    def __str__(self) -> str:
        subject = self._subject()
        text = f"{subject}: {self.reason}" if subject else self.reason
        return f"{text}. {self.hint}" if self.hint else text

    def __repr__(self) -> str:
        told = ((name, getattr(self, name)) for name in self.fields if name not in _LONG_FIELDS)
        others = (f", {name}={value!r}" for name, value in told if value is not None)
        return f"{type(self).__name__}({self.reason!r}{''.join(others)})"

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: getattr(self, name) for name in self.fields}
        return _rebuild, (type(self), state, self.__notes())

    def __notes(self) -> tuple[str, ...]:
        return tuple(getattr(self, "__notes__", ()))


def _rebuild(
    cls: type[MmrpcError], state: dict[str, Any], notes: tuple[str, ...] = ()
) -> MmrpcError:
    error = cls(state.pop("reason"), **state)
    for note in notes:
        error.add_note(note)
    return error


class ConfigError(MmrpcError, ValueError):
    """A config file or value is wrong.

    Attributes:
        file: The config file, if it came from one.
        line: Line in it, counted from 1.
        column: Column in it, counted from 1.
        key: Dotted name of the value, such as ``nodes.a.mounts``.
    """

    fields = (*MmrpcError.fields, "file", "line", "column", "key")
    file: str | None
    line: int | None
    column: int | None
    key: str | None

    def _subject(self) -> str:
        where = ":".join(str(p) for p in (self.file, self.line, self.column) if p is not None)
        return ": ".join(p for p in (where, self.key, super()._subject()) if p)


class LayoutError(MmrpcError, ValueError):
    """A dtype, shape, stride or offset that cannot be, or does not fit the storage."""


class UnsupportedTensorError(LayoutError, NotImplementedError):
    """A kind of tensor that raw bytes alone do not hold: sparse, quantized, meta or jagged."""


class PathError(MmrpcError):
    """Something is wrong with a path, or a memory location, on a node.

    Attributes:
        path: The path as this node sees it. For anonymous memory, its description.
        mount: Name of the mount that the path belongs to, if any.
    """

    fields = (*MmrpcError.fields, "path", "mount")
    verb: ClassVar[str] = "cannot use"
    errno_default: ClassVar[int | None] = None
    path: str | None
    mount: str | None

    def __init__(self, reason: str = "", *, path: Any = None, **details: Any) -> None:
        super().__init__(reason, path=None if path is None else str(path), **details)
        if self.errno_default is not None:
            _fill_os_error(self, self.errno_default, self.path)

    def _subject(self) -> str:
        if self.path is None:
            return super()._subject()
        who = f"{self.node} {self.verb}" if self.node else self.verb
        mount = f" (mount {self.mount!r})" if self.mount else ""
        return f"{who} {self.path!r}{mount}"


def _fill_os_error(error: Any, number: int, path: str | None) -> None:
    """Sets what generic handlers of OSError look at; text and pickled form stay ours."""
    error.errno = number
    error.filename = path


class PathNotFoundError(PathError, FileNotFoundError):
    """No file has that name on that node."""

    verb = "cannot find"
    errno_default = _errno.ENOENT


class PathExistsError(PathError, FileExistsError):
    """The name is taken, and replacing it was not asked for."""

    verb = "will not replace"
    errno_default = _errno.EEXIST


class PathNotReadableError(PathError, PermissionError):
    """The file is there, but the process may not read it."""

    verb = "may not read"
    errno_default = _errno.EACCES


class PathNotWritableError(PathError, PermissionError):
    """The file or its directory is there, but the process may not write to it."""

    verb = "may not write"
    errno_default = _errno.EACCES


class NotRegularFileError(PathError, OSError):
    """The name belongs to a symbolic link, directory, FIFO, socket or device."""

    verb = "will not map"
    errno_default = _errno.EINVAL


class FileTooShortError(PathError, EOFError):
    """The file holds fewer bytes than the tensor needs.

    Attributes:
        needed_bytes: Bytes from the start of the file to the end of the tensor.
        actual_bytes: Bytes that the file has.
    """

    fields = (*PathError.fields, "needed_bytes", "actual_bytes")
    verb = "cannot map"
    needed_bytes: int
    actual_bytes: int


class StaleReferenceError(PathError):
    """The file or memory is no longer the one that the reference was made from."""

    verb = "will not open"


class NotSharedError(PathError):
    """The tensor lives where the other node (or any other process) cannot reach it."""

    verb = "cannot share"


class OutsideMountsError(PathError, PermissionError):
    """The path leads outside the mounts of the node."""

    verb = "will not open"
    errno_default = _errno.EPERM


class NoSpaceError(PathError, OSError):
    """The space for the tensor could not be reserved; nothing was left behind.

    Attributes:
        needed_bytes: Bytes that were asked for.
        free_bytes: Bytes that were free, if known.
    """

    fields = (*PathError.fields, "needed_bytes", "free_bytes")
    verb = "cannot reserve space for"
    errno_default = _errno.ENOSPC
    needed_bytes: int
    free_bytes: int | None


class MountTimeoutError(PathError, TimeoutError):
    """A file system did not answer within its deadline.

    Attributes:
        timeout_s: The deadline, in seconds.
    """

    fields = (*PathError.fields, "timeout_s")
    verb = "had no answer for"
    errno_default = _errno.ETIMEDOUT
    timeout_s: float


class HandshakeError(MmrpcError):
    """Workers are absent, do not fit together, or did not prove what the config asks for.

    Every rank that came raises the same one.

    Attributes:
        rank: Rank of the process that it is about, if it is about one.
        mount: The mount that it is about, if it is about one.
        path: The path on that node, if it is about one.
        problems: All that was found, a sentence each; ``reason`` is the first.
    """

    fields = (*MmrpcError.fields, "rank", "mount", "path", "problems")
    rank: int | None
    mount: str | None
    path: str | None
    problems: tuple[str, ...]

    def __init__(
        self, reason: str = "", *, problems: tuple[str, ...] | None = None, **details: Any
    ) -> None:
        super().__init__(reason, problems=tuple(problems or (reason,)), **details)


class RpcError(MmrpcError):
    """A remote call did not give its result.

    Attributes:
        peer: Name of the worker that was called.
        function: Qualified name of the function that it was asked to run.
        elapsed_s: Seconds from the call to the error.
    """

    fields = (*MmrpcError.fields, "peer", "function", "elapsed_s")
    peer: str | None
    function: str | None
    elapsed_s: float | None

    def _subject(self) -> str:
        call = f"{self.function}() on {self.peer}" if self.function else f"call to {self.peer}"
        return call if self.peer else super()._subject()


class RpcTimeoutError(RpcError, TimeoutError):
    """The peer did not answer in time; it may still be at work.

    Attributes:
        timeout_s: The deadline, in seconds.
    """

    fields = (*RpcError.fields, "timeout_s")
    timeout_s: float | None


class PeerLostError(RpcError, ConnectionError):
    """The peer died, or the connection to it broke."""


class RemoteError(RpcError):
    """The peer raised an exception that cannot be rebuilt here.

    Attributes:
        type_name: Qualified name of its class.
        text: Its text.
        traceback: Where it was raised on the peer.
    """

    fields = (*RpcError.fields, "type_name", "text", "traceback")
    type_name: str
    text: str
    traceback: str


class LaunchError(MmrpcError):
    """A worker or an agent could not be started, or failed.

    Attributes:
        worker: Name of the worker, if it is about one.
        exit_code: Exit code for the launcher: the worker's, or 128 + the signal that ended it.
    """

    fields = (*MmrpcError.fields, "worker", "exit_code")
    worker: str | None
    exit_code: int | None
