"""What stands in for a tensor that torch's RPC could not be given."""

from __future__ import annotations

import copy
import operator
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.rpc import internal

from mmrpc import MemoryMappedTensor, errors
from mmrpc.core.standin import Unopened, unpickling_for_rpc


def deserialize(data: bytes) -> Any:
    """As torch's RPC does for what it receives."""
    return internal.deserialize(data, [])  # type: ignore[no-untyped-call]


@pytest.fixture
def gone(tmp_path: Path) -> bytes:
    """The pickle of a tensor whose file is gone."""
    x = MemoryMappedTensor.from_tensor(torch.arange(4.0), filename=tmp_path / "x.bin")
    data = pickle.dumps([x])
    (tmp_path / "x.bin").unlink()
    return data


@pytest.fixture
def standin(gone: bytes) -> Unopened:
    """What torch's RPC gets for it."""
    found = deserialize(gone)[0]
    assert type(found) is Unopened
    return found  # type: ignore[no-any-return]


def test_ordinary_unpickling_raises_at_once(gone: bytes) -> None:
    """Also after torch's unpickler failed on this thread and left its tables behind."""
    with pytest.raises(ZeroDivisionError):
        deserialize(pickle.dumps(Explodes()))
    with pytest.raises(errors.PathNotFoundError):
        pickle.loads(gone)


class Explodes:
    def __reduce__(self) -> Any:
        return operator.truediv, (1, 0)


class Asks:
    def __reduce__(self) -> Any:
        return unpickling_for_rpc, ()


def test_torchs_unpickler_is_known_from_the_stack() -> None:
    """And from nothing else."""
    data = pickle.dumps(Asks())
    assert pickle.loads(data) is False
    assert deserialize(data) is True
    assert pickle.loads(data) is False


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.shape,
        lambda x: x.sum(),
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: x @ x,
        lambda x: -x,
        lambda x: x[0],
        lambda x: operator.setitem(x, 0, 1),
        lambda x: operator.iadd(x, 1),
        lambda x: setattr(x, "data", 1),
        lambda x: x == 1,
        lambda x: x < 1,
        len,
        bool,
        float,
        int,
        list,
        str,
        hash,
        iter,
        abs,
        lambda x: f"{x}",
        lambda x: 1 in x,
        lambda x: x(),
        torch.sum,
        lambda x: torch.add(torch.ones(4), x),
        lambda x: torch.cat([torch.ones(4), x]),
        lambda x: torch.nn.functional.linear(torch.ones(4), weight=x),
        lambda x: torch.ones(4) + x,
        lambda x: x.__array__(),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_any_use_raises_the_typed_error(standin: Unopened, use: Any) -> None:
    """The same error each time, with its attributes."""
    for _ in range(2):
        with pytest.raises(errors.PathNotFoundError) as caught:
            use(standin)
        assert caught.value.path is not None


def test_it_can_be_printed_and_told_from_others(standin: Unopened) -> None:
    """By repr and isinstance, which a debugger and a log need."""
    assert repr([standin]).startswith("[<unopened tensor: PathNotFoundError: cannot find")
    assert isinstance(standin, Unopened)
    assert not isinstance(standin, torch.Tensor)


def test_it_pickles_as_the_reference(standin: Unopened, tmp_path: Path) -> None:
    """The next node may be able to open it."""
    data = pickle.dumps(standin)
    with pytest.raises(errors.PathNotFoundError):
        pickle.loads(data)
    again = deserialize(data)
    assert type(again) is Unopened
    assert pickle.dumps(again) == data


def test_use_while_a_call_is_unpickled_is_an_error_that_torch_survives(gone: bytes) -> None:
    """A Parameter uses its tensor when it is rebuilt; torch hands an AttributeError on."""
    call = internal.PythonUDF(len, (pickle.loads, NeedsTensor(gone)), {})
    found = deserialize(pickle.dumps(call))
    assert isinstance(found, AttributeError)
    assert "PathNotFoundError: cannot find" in str(found)


class NeedsTensor:
    """Uses the tensor while it is unpickled."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return use_first, (self.data,)


def use_first(data: bytes) -> Any:
    return pickle.loads(data)[0].sum()
