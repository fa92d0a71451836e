"""Messages: bytes of ours, and what torch sends beside them."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrpc import MemoryMappedTensor, errors
from mmrpc.rpc import plain, torchrpc, wire


def roundtrip(obj: Any) -> Any:
    return wire.decode(*wire.encode(obj))


@pytest.fixture
def mapped(tmp_path: Path) -> MemoryMappedTensor:
    """A mapped 2x3 tensor."""
    return MemoryMappedTensor.from_tensor(
        torch.arange(6.0).reshape(2, 3), filename=tmp_path / "x.bin"
    )


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(plain_values)
def test_plain_values_come_back(value: Any) -> None:
    """Any nesting of Python's own types, with nothing beside the bytes."""
    data, carried = wire.encode(value)
    assert carried == []
    assert wire.decode(data, carried) == value


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(3).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    ],
    ids=["nested", "csr", "csc", "bsr"],
)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta) (stage|state):UserWarning")
def test_tensors_that_torchs_rpc_does_not_take_travel_by_their_parts(make: Any) -> None:
    """What is carried is what it takes: over some others its serializer aborts the process."""
    x = make()
    data, carried = wire.encode(x)
    assert all(part.layout is torch.strided and not part.is_nested for part in carried)
    y = wire.decode(data, carried)
    assert (y.layout, y.is_nested) == (x.layout, x.is_nested)
    parts = [t.unbind() if t.is_nested else [t.to_dense()] for t in (x, y)]
    assert all(map(torch.equal, *parts))


def test_an_ordinary_tensor_is_carried_once(mapped: torch.Tensor) -> None:
    """It is torch's to send, and stays one object if it occurs twice."""
    x = torch.ones(1000)
    data, carried = wire.encode({"a": x, "b": [x]})
    assert carried[0] is x
    assert len(carried) == 1
    assert len(data) < 200
    found = wire.decode(data, carried)
    assert found["a"] is found["b"][0] is x


def test_a_mapped_tensor_is_in_the_bytes(mapped: MemoryMappedTensor) -> None:
    """As a reference, with its class; a plain view of it comes back plain."""
    data, carried = wire.encode([mapped, mapped[1], mapped.t()])
    assert carried == []
    same, row, turned = wire.decode(data, carried)
    assert type(same) is type(row) is MemoryMappedTensor
    assert type(turned) is torch.Tensor
    same[1, 2] = 50
    assert row[2] == turned[2, 1] == mapped[1, 2] == 50


def test_a_view_of_a_gone_file_is_refused_by_decode(mapped: MemoryMappedTensor) -> None:
    """Where an exception can be caught: not inside torch's unpickler."""
    message = wire.encode({"view": mapped.t()})
    Path(mapped.filename).unlink()
    with pytest.raises(errors.PathNotFoundError):
        wire.decode(*message)


def test_a_parameter_and_a_module_on_mapped_memory_go_by_reference(
    mapped: MemoryMappedTensor,
) -> None:
    """No bytes are beside the message, and the copies see what is written."""
    layer = torch.nn.Linear(3, 2, bias=False)
    layer.weight = torch.nn.Parameter(mapped.view(2, 3), requires_grad=True)
    data, carried = wire.encode(layer)
    assert carried == []
    copy = wire.decode(data, carried)
    assert copy.weight.requires_grad
    mapped[0, 0] = 9
    assert copy.weight[0, 0] == 9


def test_a_mapped_leaf_keeps_requires_grad(mapped: MemoryMappedTensor) -> None:
    """Outside a distributed autograd context."""
    assert roundtrip(mapped.view(-1).requires_grad_()).requires_grad


def test_sparse_and_other_layouts_are_carried() -> None:
    """Only strided tensors can be mapped."""
    x = torch.eye(3).to_sparse()
    data, carried = wire.encode([x])
    assert carried[0] is x
    assert wire.decode(data, carried)[0] is x


@pytest.mark.parametrize("fn", [torch.sum, torch.nn.functional.relu, torch.Tensor.add, len, max])
def test_functions_travel_by_name(fn: Any) -> None:
    """Builtins of torch and of Python among them."""
    assert roundtrip(fn) is fn


def test_a_registered_class_is_left_to_torch() -> None:
    """As RemoteModule is, which has a reducer of its own in torch's RPC."""
    pickler = torchrpc.pickler()
    pickler._register_reducer(Registered, lambda _: (Registered, ()))
    try:
        obj = Registered()
        _, carried = wire.encode([obj])
        assert carried[0] is obj
    finally:
        del pickler._class_reducer_dict[Registered]


class Registered:
    pass


class Decodes:
    """Reads another message while it is itself read."""

    def __init__(self, message: wire.Message) -> None:
        self.message = message

    def __reduce__(self) -> Any:
        return wire.decode, self.message


def test_a_message_in_a_message_has_its_own_tensors() -> None:
    """Reading the inner one does not confuse the numbers of the outer one."""
    inner, outer = torch.zeros(1), torch.ones(1)
    found = roundtrip([Decodes(wire.encode(inner)), outer])
    assert found[0] is inner
    assert found[1] is outer


def test_decode_leaves_nothing_on_the_thread() -> None:
    """Also when it raises."""
    with pytest.raises(pickle.UnpicklingError):
        wire.decode(b"junk", [torch.ones(1)])
    assert wire._decoding.carried is None


def test_threads_do_not_see_each_others_tensors() -> None:
    """Two messages are read at the same time."""
    barrier = threading.Barrier(2)
    found: dict[int, Any] = {}

    def read(number: int) -> None:
        message = wire.encode(torch.full((1,), number))
        barrier.wait(30)
        found[number] = wire.decode(*message).item()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: 0, 1: 1}


def test_registering_for_plain_torch_calls_can_be_repeated() -> None:
    """The hook is there in this version of torch."""
    assert plain.register()
    assert plain.register()


def test_without_torchs_private_hook_nothing_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A version of torch that renamed it still works, with plain views copied."""
    monkeypatch.setattr(torchrpc.internal, "_internal_rpc_pickler", None)
    assert not plain.register()
    assert wire.encode([torch.ones(1)])[1][0].item() == 1
