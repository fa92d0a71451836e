"""A mapped tensor is the tensor that torch would have, here and wherever it is sent."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrpc import MemoryMappedTensor, TensorRef, ref
from tests.peers import Peer
from tests.unit.core.tensors import (
    ORDINARY,
    PLACES,
    bits,
    describe,
    flip,
    in_file,
    indices,
    open_and_describe,
    open_and_flip,
    random_tensor,
    shapes,
    steps,
)

# Torch says so of complex32, once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


@pytest.mark.parametrize("place", PLACES)
@given(data=st.data())
def test_chains_of_views_are_torchs(
    place: str, data: st.DataObject, tmp_path: Path, peer: Peer
) -> None:
    """Any chain of views has torch's values, shape and strides, before and after it is sent."""
    plain = random_tensor(data.draw(st.sampled_from(ORDINARY)), data.draw(shapes))
    mapped: torch.Tensor = PLACES[place](plain, tmp_path)
    for _ in range(data.draw(st.integers(0, 3))):
        method, args = data.draw(steps(tuple(plain.shape)))
        kept = type(mapped) if method == "__getitem__" else torch.Tensor
        plain, mapped = getattr(plain, method)(*args), getattr(mapped, method)(*args)
        assert type(mapped) is kept
    expected = describe(plain)[1:]
    assert describe(mapped)[1:] == expected
    assert describe(ref(mapped).open())[1:] == expected
    assert describe(TensorRef.from_json(ref(mapped).to_json()).open_plain())[1:] == expected
    assert peer.call(open_and_describe, ref(mapped))[1:] == expected
    if isinstance(mapped, MemoryMappedTensor):
        assert describe(pickle.loads(pickle.dumps(mapped))) == describe(mapped)
        assert peer.call(describe, mapped) == describe(mapped)
        assert describe(copy.copy(mapped)) == describe(mapped)
        assert bits(copy.deepcopy(mapped)) == bits(plain)


@pytest.mark.parametrize("place", ["file", "memory", "offset"])
@given(data=st.data())
def test_writes_arrive_through_any_view(
    place: str, data: st.DataObject, tmp_path: Path, peer: Peer
) -> None:
    """What a receiver writes through a view changes those elements here, and no others."""
    whole = random_tensor(data.draw(st.sampled_from(ORDINARY)), data.draw(shapes))
    mapped_whole = PLACES[place](whole, tmp_path)
    plain, mapped = whole, mapped_whole.detach()
    for _ in range(data.draw(st.integers(0, 3))):
        method, args = data.draw(steps(tuple(plain.shape)).filter(lambda step: step[0] != "expand"))
        plain, mapped = getattr(plain, method)(*args), getattr(mapped, method)(*args)
    flip(plain)
    peer.call(open_and_flip, ref(mapped))
    assert bits(mapped_whole) == bits(whole)


@given(data=st.data())
def test_assignment_is_torchs(data: st.DataObject, tmp_path: Path) -> None:
    """Assigning to any index writes to the file what torch writes to a tensor."""
    plain = random_tensor(torch.int32, data.draw(shapes))
    mapped = in_file(plain, tmp_path)
    index = data.draw(indices(tuple(plain.shape)))
    plain[index] = mapped[index] = data.draw(st.integers(-9, 9))
    assert bits(mapped) == bits(plain)
    assert Path(mapped.filename).read_bytes() == bytes(plain.view(-1).view(torch.uint8).tolist())


_rows = st.integers(0, 3).flatmap(
    lambda width: st.lists(st.tuples(*[st.integers(0, 4)] * width), min_size=1, max_size=4)
)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("place", ["file", "memory", "private"])
@given(
    rows=_rows,
    dtype=st.sampled_from([torch.float32, torch.int64, torch.uint8]),
    transposed=st.booleans(),
)
def test_nested_tensors_are_torchs(
    rows: list[tuple[int, ...]],
    dtype: torch.dtype,
    transposed: bool,
    place: str,
    tmp_path: Path,
    peer: Peer,
) -> None:
    """A nested tensor, transposed or not, has torch's components, before and after it is sent."""
    parts = [random_tensor(dtype, row) for row in rows]
    plain = torch.nested.nested_tensor(parts, dtype=dtype)
    mapped: torch.Tensor = PLACES[place](plain, tmp_path)
    assert bits(mapped) == [bits(part) for part in parts]
    assert {type(part) for part in mapped.unbind(0)} == {MemoryMappedTensor}
    assert describe(pickle.loads(pickle.dumps(mapped))) == describe(mapped)
    assert peer.call(describe, mapped) == describe(mapped)
    if transposed and len(rows[0]) >= 2:
        plain, mapped = plain.transpose(-1, -2), mapped.transpose(-1, -2)
        assert bits(mapped) == bits(plain)
        assert peer.call(open_and_describe, ref(mapped))[1:] == describe(mapped)[1:]
        assert bits(in_file(mapped, tmp_path)) == bits(plain)
    assert peer.call(open_and_describe, ref(mapped[-1]))[1] == bits(plain)[-1]
