"""What stands in for a tensor whose reference could not be opened while torch unpickled a message.

An exception inside torch's own RPC unpickler leaves the caller waiting, and its shutdown
hanging. So there, and only there, a reference that fails is loaded as an `Unopened`, which
raises the same error at first use. Everywhere else unpickling raises at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


def unpickling_for_rpc() -> bool:
    """Whether the caller runs inside the unpickler of `torch.distributed.rpc`.

    Looks at the stack rather than at torch's thread-local tables, which stay behind on the
    thread after an unpickling that raised. Only worth asking once a reference has failed.
    """
    return _rpc_unpickler() is not None


def _rpc_unpickler() -> FrameType | None:
    internal = sys.modules.get("torch.distributed.rpc.internal")
    deserialize = getattr(getattr(internal, "_InternalRPCPickler", None), "deserialize", None)
    code = getattr(deserialize, "__code__", None)
    frame = sys._getframe(1) if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


class Unopened:
    """A tensor that could not be opened; any use of it raises the error that says why.

    It pickles back to the reference that it was loaded from, so that passing it on gives the
    next node the tensor, if that node can open it.

    Args:
        load: The function of the reference's pickle form.
        args: Its arguments.
        error: What opening the reference raised.
    """

    __slots__ = ("_args", "_error", "_load")

    def __init__(self, load: Callable[..., Any], args: tuple[Any, ...], error: Exception) -> None:
        object.__setattr__(self, "_load", load)
        object.__setattr__(self, "_args", args)
        object.__setattr__(self, "_error", error)

    def __repr__(self) -> str:
        error = object.__getattribute__(self, "_error")
        return f"<unopened tensor: {type(error).__name__}: {error}>"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return object.__getattribute__(self, "_load"), object.__getattribute__(self, "_args")

    def __getattribute__(self, name: str) -> Any:
        # What pickling, isinstance() and repr() ask for must not raise.
        if name not in _SAFE_ATTRIBUTES:
            _refuse(self)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Raises the error of the first stand-in among the arguments of a torch function."""
        found = _find((args, kwargs or {}))
        if found is None:
            raise TypeError(f"{func} got a tensor that could not be opened")
        _refuse(found)


_SAFE_ATTRIBUTES = frozenset(
    {"__class__", "__reduce_ex__", "__reduce__", "__repr__", "__doc__", "__torch_function__"}
)


def _refuse(standin: Unopened, *_: Any, **__: Any) -> NoReturn:
    error = object.__getattribute__(standin, "_error")
    unpickler = _rpc_unpickler()
    # Something in the message, such as a Parameter, uses its tensor while it is unpickled. The
    # one exception that torch survives there is AttributeError, and in the arguments of a call
    # only; for results it gives the caller a RuntimeError by itself.
    if unpickler is not None and b"PythonUDF" in unpickler.f_locals.get("binary_data", b"")[:256]:
        raise AttributeError(f"{type(error).__name__}: {error}") from error
    raise error


def _find(obj: Any) -> Unopened | None:
    if isinstance(obj, Unopened):
        return obj
    if isinstance(obj, dict):
        obj = tuple(obj.values())
    if isinstance(obj, (tuple, list)):
        return next((found for item in obj if (found := _find(item)) is not None), None)
    return None


_BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_OTHER = (
    *("neg", "pos", "abs", "invert", "round", "lt", "le", "eq", "ne", "gt", "ge", "hash"),
    *("len", "bool", "iter", "next", "reversed", "contains", "getitem", "setitem", "delitem"),
    *("call", "int", "float", "complex", "index", "bytes", "str", "format"),
    *("array", "dlpack", "copy", "deepcopy", "enter", "exit"),
)


def _refuse_operators() -> None:
    # Python looks operators up on the class, so each needs a method there.
    names = [f"__{side}{name}__" for name in _BINARY for side in ("", "r", "i")]
    names += [f"__{name}__" for name in _OTHER]
    for name in names:
        setattr(Unopened, name, _refuse)


_refuse_operators()
