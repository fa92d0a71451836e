"""The envelope of a result: it pickles and unpickles without raising, whatever is in it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from mmrpc.rpc import wire
from mmrpc.rpc.failure import Failure
from mmrpc.rpc.spool import peers
from mmrpc.rpc.spool import policy as spool

if TYPE_CHECKING:
    from mmrpc.rpc.faults import Call
    from mmrpc.rpc.spool.peers import Address


class Reply:
    """A value or a failure, on the node that has it or on the way to the one that asked.

    torch pickles it inside its own serializer, and unpickles it inside its own unpickler:
    neither survives an exception. So a value that does not pickle becomes a failure, and what
    arrives stays bytes until `unwrap`.
    """

    __slots__ = ("_failure", "_message", "_receiver", "_sender", "_value")

    _value: Any
    _failure: Failure | None
    _message: wire.Message | None
    _receiver: Address | None
    _sender: Address | None

    @classmethod
    def of(cls, value: Any, receiver: Address | None = None) -> Reply:
        """Wraps a value.

        Args:
            value: What the function returned.
            receiver: The process that will get it, and nobody else, if that is known.
        """
        reply = cls._make(value, None, None)
        reply._receiver = receiver
        return reply

    @classmethod
    def failed(cls, error: BaseException) -> Reply:
        """Wraps an exception."""
        return cls._make(None, Failure.of(error), None)

    @classmethod
    def _make(cls, value: Any, failure: Failure | None, message: wire.Message | None) -> Reply:
        reply = cls.__new__(cls)
        reply._value, reply._failure, reply._message = value, failure, message
        reply._receiver = reply._sender = None
        return reply

    def unwrap(self, call: Call) -> Any:
        """Gives the value, or raises what the peer raised.

        Args:
            call: The call that this is the reply to.

        Raises:
            PathError: If a reference in the value cannot be opened on this node.
            RemoteError: If the peer's exception cannot be rebuilt here.
        """
        if self._sender is not None:
            peers.learn(call.peer, self._sender)
        if self._failure is not None:
            raise self._failure.error(
                peer=call.peer, function=call.function, elapsed_s=call.elapsed_s
            )
        if self._message is not None:
            return wire.decode(*self._message)
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        failure = self._failure
        if failure is None:
            if self._message is not None:
                return _received_value, (*self._message, self._sender)
            try:
                message = wire.encode(self._value, self._receiver)
                return _received_value, (*message, spool.own_address(self._receiver))
            except BaseException as error:
                failure = Failure.of(error)
        told = pickle.dumps((failure.type_name, failure.text, failure.traceback, failure.data))
        return _received_failure, (told, failure.carried)


def _received_value(data: bytes, carried: list[Any], sender: Address | None) -> Reply:
    reply = Reply._make(None, None, (data, carried))
    reply._sender = sender
    return reply


def _received_failure(told: bytes, carried: list[Any]) -> Reply:
    type_name, text, traceback, data = pickle.loads(told)
    return Reply._make(None, Failure(type_name, text, traceback, data, carried), None)
