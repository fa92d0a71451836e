"""Envelopes that neither pickling nor unpickling can break."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors
from mmrpc.rpc.faults import Call
from mmrpc.rpc.reply import Reply

CALL = Call("w1", "f")


class Explodes:
    """Raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise MemoryError("while unpickling")


class Exits:
    """Wants to end the process when it is pickled."""

    def __reduce__(self) -> Any:
        raise SystemExit("while pickling")


def send(reply: Reply) -> Reply:
    copy: Reply = pickle.loads(pickle.dumps(reply))
    return copy


def test_a_value_is_the_same_object_where_it_is() -> None:
    """Nothing is copied on the owner of an RRef."""
    value = [1]
    assert Reply(value).unwrap(CALL) is value


def test_a_value_arrives() -> None:
    """Also through two hops, and None is a value."""
    assert send(send(Reply({"a": 1}))).unwrap(CALL) == {"a": 1}
    assert send(Reply(None)).unwrap(CALL) is None


def test_each_fetch_sends_what_the_value_is_then() -> None:
    """An RRef's value can change."""
    value = [1]
    reply = Reply(value)
    assert send(reply).unwrap(CALL) == [1]
    value.append(2)
    assert send(reply).unwrap(CALL) == [1, 2]


def test_a_failure_is_raised_when_it_is_unwrapped() -> None:
    """Not while it travels."""
    reply = send(send(Reply.failed(KeyError("k"))))
    with pytest.raises(KeyError, match="k"):
        reply.unwrap(CALL)


def test_a_value_that_does_not_pickle_becomes_a_failure() -> None:
    """With the error of pickling."""
    with pytest.raises(TypeError, match="cannot pickle"):
        send(Reply(threading.Lock())).unwrap(CALL)


def test_pickling_that_wants_to_exit_becomes_a_failure() -> None:
    """The process of the callee goes on."""
    with pytest.raises(errors.RemoteError, match="SystemExit"):
        send(Reply(Exits())).unwrap(CALL)


def test_a_value_that_does_not_unpickle_raises_when_it_is_unwrapped() -> None:
    """On the thread of the caller."""
    reply = send(Reply([Explodes()]))
    with pytest.raises(MemoryError, match="while unpickling"):
        reply.unwrap(CALL)


def test_a_tensor_that_may_not_be_shared_becomes_a_failure(tmp_path: Path) -> None:
    """Written to in mode "r", it is in this process only."""
    path = tmp_path / "x.bin"
    MemoryMappedTensor.from_tensor(torch.ones(2), filename=path)
    x = MemoryMappedTensor.from_filename(path, torch.float32, (2,), mode="r")
    x[0] = 5
    with pytest.raises(errors.NotSharedError):
        send(Reply({"x": x})).unwrap(CALL)


def test_a_reference_is_opened_when_it_is_unwrapped(tmp_path: Path) -> None:
    """So that its error is the caller's, with the path."""
    x = MemoryMappedTensor.from_tensor(torch.ones(2), filename=tmp_path / "x.bin")
    reply = send(Reply([x]))
    (tmp_path / "x.bin").unlink()
    with pytest.raises(errors.PathNotFoundError) as caught:
        reply.unwrap(CALL)
    assert caught.value.path == x.filename
