"""The envelope of a result: it pickles and unpickles without raising, whatever is in it.

torch pickles a result inside its own serializer, and unpickles it inside its own unpickler:
neither survives an exception. So a value that does not pickle becomes a failure, and what
arrives stays bytes until it is `unseal`ed, on the thread of the caller.
"""

from __future__ import annotations

import pickle
from types import NoneType
from typing import TYPE_CHECKING, Any

from mmrpc.rpc import wire
from mmrpc.rpc.failure import Failure
from mmrpc.rpc.spool import peers

if TYPE_CHECKING:
    from mmrpc.rpc.faults import Call
    from mmrpc.rpc.spool.peers import Address

_SAFE = frozenset({NoneType, bool, int, float, str, bytes})
"""Types whose values go as they are: they always pickle, and hold nothing that does not."""


def seal(value: Any, receiver: Address | None = None, sender: Address | None = None) -> Any:
    """Gives what torch is to carry for a value.

    Args:
        value: What the function returned.
        receiver: The process that will get it, and nobody else, if that is known.
        sender: What the receiver is to be told about this process.
    """
    if sender is None and type(value) in _SAFE:
        return value
    return _seal(value, receiver, sender)


def _seal(value: Any, receiver: Address | None, sender: Address | None) -> tuple[Any, ...]:
    try:
        return *wire.encode(value, receiver), sender
    except BaseException as error:
        return seal_error(error)


def seal_error(error: BaseException) -> tuple[Any, ...]:
    """Gives what torch is to carry for an exception."""
    failure = Failure.of(error)
    told = pickle.dumps((failure.type_name, failure.text, failure.traceback, failure.data))
    return told, failure.carried


def unseal(envelope: Any, call: Call) -> Any:
    """Gives the value, or raises what the peer raised.

    Args:
        envelope: What `seal` or `seal_error` gave on the peer.
        call: The call that it is the answer to.

    Raises:
        PathError: If a reference in the value cannot be opened on this node.
        RemoteError: If the peer's exception cannot be rebuilt here.
    """
    if type(envelope) is not tuple:
        return envelope
    data, carried, *rest = envelope
    if not rest:
        type_name, text, traceback, pickled = pickle.loads(data)
        failure = Failure(type_name, text, traceback, pickled, carried)
        raise failure.error(peer=call.peer, function=call.function, elapsed_s=call.elapsed_s)
    if rest[0] is not None:
        peers.learn(call.peer, rest[0], told=call.told)
    return wire.decode(data, carried)


class Reply:
    """The value of an RRef, on its owner or on the way to the one that asked.

    It is sealed anew whenever it is sent: the value can change.
    """

    __slots__ = ("_envelope", "_value")

    def __init__(self, value: Any = None, envelope: Any = None) -> None:
        self._value, self._envelope = value, envelope

    @classmethod
    def failed(cls, error: BaseException) -> Reply:
        """Wraps an exception that the function raised."""
        return cls(envelope=seal_error(error))

    def unwrap(self, call: Call) -> Any:
        """Gives the value, the object itself on the owner, or raises as `unseal` does.

        Args:
            call: The call that this is the answer to.
        """
        return self._value if self._envelope is None else unseal(self._envelope, call)

    def __reduce__(self) -> tuple[Any, ...]:
        envelope = self._envelope
        if envelope is None:
            envelope = _seal(self._value, None, peers.own_address())
        return Reply, (None, envelope)
