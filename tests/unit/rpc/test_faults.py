"""torch's texts, and the errors that they become."""

from __future__ import annotations

import pytest

from mmrpc import errors
from mmrpc.rpc import faults, torchrpc
from mmrpc.rpc.faults import Call

LOST = [
    "eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)",
    "EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)",
    "ECONNREFUSED: connection refused (this error originated at tensorpipe/transport/uv/x.cc:1)",
    "pipe closed (this error originated at tensorpipe/core/pipe_impl.cc:356)",
    "async error on socket: Connection reset by peer",
    "EPIPE: broken pipe",
]


@pytest.mark.parametrize("text", LOST)
def test_a_broken_connection_is_a_lost_peer(text: str) -> None:
    """With the peer, the function, and what torch said."""
    error = faults.typed(RuntimeError(text), Call("w1", "f"))
    assert type(error) is errors.PeerLostError
    assert (error.peer, error.function) == ("w1", "f")
    assert text in str(error)
    assert "SIGBUS" in str(error)
    assert error.elapsed_s is not None


def test_torchs_timeout_is_typed_with_its_limit() -> None:
    """The limit is the one that torch names."""
    text = "RPC ran for more than set timeout (1500 ms) and will now be marked with an error"
    error = faults.typed(RuntimeError(text), Call("w1", "f", 9))
    assert type(error) is errors.RpcTimeoutError
    assert error.timeout_s == 1.5
    assert isinstance(error, TimeoutError)


@pytest.mark.parametrize(("passed", "told"), [(0.2, 0.2), (torchrpc.UNSET, 7.0)])
def test_a_timeout_without_a_number_tells_the_calls(
    passed: float, told: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the call, or the one of the group."""
    monkeypatch.setattr(torchrpc.rpc, "get_rpc_timeout", lambda: 7.0)
    error = faults.typed(RuntimeError("RPCErr:1:expired"), Call("w1", "f", passed))
    assert type(error) is errors.RpcTimeoutError
    assert error.timeout_s == told


@pytest.mark.parametrize(
    "text", ["something else", "the eof of a file", "timeout", "RPCErr:0:unknown", ""]
)
def test_anything_else_stays_torchs(text: str) -> None:
    """No type is guessed."""
    assert faults.typed(RuntimeError(text), Call("w1", "f")) is None
