"""References to objects that live on another worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from mmrpc.rpc import calls, torchrpc
from mmrpc.rpc.faults import Call
from mmrpc.rpc.reply import Reply
from mmrpc.rpc.serve import Pending
from mmrpc.rpc.torchrpc import UNSET

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value on its owner, with the methods of torch's RRef.

    It holds one of torch's, whose reference counting does the work, and goes wherever that
    goes: through calls of either package, into `DistributedOptimizer`, into results.

    Args:
        value: The value; this worker is its owner.
        type_hint: The TorchScript interface of the value, for TorchScript functions only.

    Attributes:
        torch_rref: The one that it holds.
    """

    __slots__ = ("__weakref__", "_function", "torch_rref")

    torch_rref: Any
    """The RRef of torch that this one wraps."""
    _function: str
    """What made the value, for errors; where that is not known, the method that failed."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        self._function = ""
        if type_hint is None:
            self.torch_rref = torchrpc.rpc.RRef(Reply(value))
        else:
            # TorchScript reads the value itself: it must not be in an envelope.
            self.torch_rref = torchrpc.rpc.RRef(value, type_hint)

    def to_here(self, timeout: float = UNSET) -> T:
        """Gives a copy of the value; mapped tensors in it come as references.

        Args:
            timeout: Seconds to wait; 0 for no limit. Defaults to the one of `init_rpc`.

        Raises:
            PathError: If a reference could not be opened, there or here.
            RpcTimeoutError: If no answer came in time.
            PeerLostError: If the owner died.
            RemoteError: If the function raised what cannot be rebuilt here; anything else
                that it raised is raised as it was.
        """
        value: T = calls.result(
            lambda: self.torch_rref.to_here(timeout), self._call("RRef.to_here", timeout)
        )
        return value

    def local_value(self) -> T:
        """Gives the value itself, on its owner."""
        value: T = calls.result(self.torch_rref.local_value, self._call("RRef.local_value"))
        return value

    def owner(self) -> torchrpc.WorkerInfo:
        """Gives the worker that has the value."""
        owner: torchrpc.WorkerInfo = self.torch_rref.owner()
        return owner

    def owner_name(self) -> str:
        """Gives the name of the worker that has the value."""
        return str(self.torch_rref.owner_name())

    def is_owner(self) -> bool:
        """Whether this worker has the value."""
        return bool(self.torch_rref.is_owner())

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference."""
        return bool(self.torch_rref.confirmed_by_owner())

    def rpc_sync(self, timeout: float = UNSET) -> Any:
        """Gives a proxy whose methods run on the owner's value and return their results."""
        return _Proxy(self, calls.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET) -> Any:
        """Gives a proxy whose methods run on the owner's value and return futures."""
        return _Proxy(self, calls.rpc_async, timeout)

    def remote(self, timeout: float = UNSET) -> Any:
        """Gives a proxy whose methods run on the owner's value and return RRefs."""
        return _Proxy(self, remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass from the value, a scalar tensor, on its owner.

        Args:
            dist_autograd_ctx_id: Distributed autograd context that collects the gradients; -1
                to add them to the tensors.
            retain_graph: Whether the graph can be used again.
        """
        if self.is_owner():
            _backward(self, dist_autograd_ctx_id, retain_graph)
        else:
            calls.rpc_sync(self.owner(), _backward, (self, dist_autograd_ctx_id, retain_graph))

    def _get_type(self, timeout: float = UNSET, blocking: bool = True) -> Any:
        call: Callable[..., Any] = calls.rpc_sync if blocking else calls.rpc_async
        return call(self.owner(), _type_of, (self,), timeout=timeout)

    def _get_future(self) -> Any:
        return self.torch_rref._get_future()

    def _call(self, name: str, timeout: float = UNSET) -> Call:
        return Call(self.owner_name(), self._function or name, timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        return wrap, (self.torch_rref,)

    def __repr__(self) -> str:
        return f"mmrpc.{self.torch_rref}"


def wrap(torch_rref: Any, function: str = "") -> RRef[Any]:
    """Gives the RRef that wraps one of torch's.

    Args:
        torch_rref: The RRef of torch.
        function: Qualified name of the function that makes the value, if known.
    """
    rref: RRef[Any] = RRef.__new__(RRef)
    rref.torch_rref, rref._function = torch_rref, function
    return rref


def remote(
    to: torchrpc.Peer,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> RRef[Any]:
    """Runs a function on another worker and gives a reference to its result, at once.

    Args:
        to: Name, rank or `WorkerInfo` of the worker that will own the result.
        func: The function; the worker imports it by name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds for the creation; 0 for no limit. Defaults to the one of `init_rpc`.

    Returns:
        The reference. What went wrong is raised when the value is asked for.
    """
    call, torch_rref = calls.send_remote(to, func, args, kwargs, timeout)
    return wrap(torch_rref, call.function)


class _Proxy:
    """Makes a method call on the owner's value out of an attribute."""

    def __init__(self, rref: RRef[Any], api: Callable[..., Any], timeout: float) -> None:
        self._rref, self._api, self._timeout = rref, api, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        rref, api, timeout = self._rref, self._api, self._timeout

        def method(*args: Any, **kwargs: Any) -> Any:
            return api(rref.owner(), _call_method, (rref, name, args, kwargs), timeout=timeout)

        return method


def _call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    method = getattr(rref.local_value(), name)
    value = method(*args, **kwargs)
    return Pending(value) if hasattr(method, "_wrapped_async_rpc_function") else value


_call_method.describe_call = lambda args: f"RRef.{args[1]}"  # type: ignore[attr-defined]


def _type_of(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def _backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"RRef.backward needs a tensor, not {type(value).__name__}")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        torchrpc.autograd.backward(context_id, [value], retain_graph)
