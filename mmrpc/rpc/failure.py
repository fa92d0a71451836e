"""An exception on its way to the node that asked."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

from mmrpc.errors import RemoteError
from mmrpc.rpc import wire


class RemoteTraceback(Exception):  # noqa: N818 -- it is printed as the cause, never raised
    """Carries the text of a traceback on another node, as the cause of the error it is of."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}" if self.args else ""


@dataclass(frozen=True, slots=True)
class Failure:
    """What is told about an exception, in a form that always arrives.

    Attributes:
        type_name: Qualified name of its class.
        text: Its text.
        traceback: Where it was raised, and its causes, as Python prints them.
        data: The exception, pickled by `wire.encode`; None if it does not survive that.
        carried: What travels beside `data`.
    """

    type_name: str
    text: str
    traceback: str
    data: bytes | None = None
    carried: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describes an exception, and pickles it if a copy of it comes out the same.

        `SystemExit`, `KeyboardInterrupt` and their like are described only: they end the
        process in which they are raised, and the node that asked is not that process.
        """
        message = _pickled(error) if isinstance(error, Exception) else None
        data, carried = message or (None, [])
        return cls(_type_name(type(error)), _text(error), _traceback(error), data, carried)

    def error(
        self, *, peer: str | None, function: str | None, elapsed_s: float | None
    ) -> Exception:
        """Builds the exception to raise at the node that asked.

        Args:
            peer: Name of the worker that failed.
            function: Qualified name of the function that was called.
            elapsed_s: Seconds since the call.

        Returns:
            The exception itself, with the remote traceback as its cause; a `RemoteError` if
            it cannot be rebuilt here.
        """
        if self.data is not None:
            try:
                error = wire.decode(self.data, self.carried)
                if isinstance(error, Exception):
                    error.__cause__ = RemoteTraceback(self.traceback)
                    return error
            except Exception:  # noqa: S110 -- its class may be missing here: told by type and text
                pass
        remote = RemoteError(
            f"it raised {self.type_name}: {self.text}",
            peer=peer,
            function=function,
            elapsed_s=elapsed_s,
            type_name=self.type_name,
            text=self.text,
            traceback=self.traceback,
        )
        remote.__cause__ = RemoteTraceback(self.traceback)
        return remote


def _pickled(error: Exception) -> wire.Message | None:
    for form in (error, _Rebuilt(error)):
        try:
            message = wire.encode(form)
            copy = wire.decode(*message)
        except BaseException:  # noqa: S112 -- pickling runs code of the user's
            continue
        if type(copy) is type(error) and _text(copy) == _text(error):
            return message
    return None


class _Rebuilt:
    """An exception that is rebuilt without its constructor, which may want other arguments."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self.error
        return _rebuild, (type(error), error.args, _portable(vars(error)))


def _rebuild(cls: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _portable(state: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in state.items():
        try:
            wire.decode(*wire.encode(value))
        except BaseException:  # noqa: S112 -- a lock or a socket in an exception stays behind
            continue
        kept[name] = value
    return kept


# The methods of an exception are the user's code. Whatever they do, the caller waits for an answer.


def _type_name(cls: type) -> str:
    # Past what a metaclass makes of these names.
    module = type.__getattribute__(cls, "__module__")
    name = str(type.__getattribute__(cls, "__qualname__"))
    return name if module == "builtins" else f"{module}.{name}"


def _text(error: BaseException) -> str:
    try:
        return "".join([str(error)])  # joined, a subclass of str becomes a str
    except BaseException as broken:
        return f"<its text cannot be read: {_type_name(type(broken))}>"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:
        return f"{_type_name(type(error))}: {_text(error)}"
