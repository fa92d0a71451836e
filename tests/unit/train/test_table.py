"""The header of an arena: computed, read, and refused where it is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrpc.errors import LayoutError, UnsupportedTensorError
from mmrpc.train.table import Spec, Table, difference

DTYPES = [torch.float32, torch.float64, torch.int8, torch.bool, torch.bfloat16, torch.complex64]
SPECS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.builds(
        Spec,
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=8,
)


def whole(table: Table) -> memoryview:
    return memoryview(table.header.ljust(table.nbytes, b"\0"))


@given(SPECS)
def test_what_was_planned_is_read(specs: dict[str, Spec]) -> None:
    """Parsing the header gives the same tensors at the same places."""
    table = Table.plan(specs, {"version": "3"})
    read = Table.parse(whole(table))
    assert read.layouts == table.layouts
    assert read.metadata == {"version": "3"}
    assert read.specs() == specs


@given(SPECS)
def test_tensors_are_aligned_and_do_not_overlap(specs: dict[str, Spec]) -> None:
    """Each starts where its dtype can, and the file has no gap and nothing twice."""
    table = Table.plan(specs)
    places = sorted((at.offset_bytes, at.span_bytes) for at in table.layouts.values())
    end = len(table.header)
    assert end % 64 == 0
    for start, nbytes in places:
        assert start == end
        end += nbytes
    assert end == table.nbytes
    for at in table.layouts.values():
        assert at.offset_bytes % at.dtype.itemsize == 0


def test_safetensors_reads_it() -> None:
    """The format's own reader takes the file, with its metadata."""
    from safetensors.torch import load

    table = Table.plan({"a": Spec(torch.float32, (2, 3)), "b": Spec(torch.uint8, (5,))})
    tensors = load(bytes(whole(table)))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {"a": (2, 3), "b": (5,)}


def test_a_dtype_without_a_name_is_refused() -> None:
    """The error names the tensor and its dtype."""
    with pytest.raises(UnsupportedTensorError, match=r"'z' is of torch\.complex128"):
        Table.plan({"z": Spec(torch.complex128, (1,))})


def test_a_name_that_the_format_has_for_itself_is_refused() -> None:
    """Its tensor would take the place of the metadata."""
    with pytest.raises(UnsupportedTensorError, match=r"'__metadata__'. Give it another name"):
        Table.plan({"__metadata__": Spec(torch.float32, (1,))})


def header(document: object) -> bytes:
    text = json.dumps(document).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "too short"),
        (b"\xff" * 20, "does not end in it"),
        (header([1]) + bytes(8), "cannot be read"),
        (header({"a": ENTRY}) + bytes(7), "has .* bytes, and its header tells of"),
        (header({"a": ENTRY}) + bytes(9), "has .* bytes, and its header tells of"),
        (header({"a": ENTRY | {"dtype": "F99"}}) + bytes(8), "cannot be read"),
        (header({"a": ENTRY | {"shape": [3]}}) + bytes(8), "do not suit the shape"),
        (header({"a": ENTRY | {"shape": [-1]}}) + bytes(8), "not negative"),
        (header({"a": ENTRY | {"data_offsets": [-8, 0]}}) + bytes(8), "do not suit"),
        (header({"a": {"shape": [2]}}) + bytes(8), "cannot be read"),
        ((2000).to_bytes(8, "little") + b"[" * 2000, "cannot be read"),
    ],
)
def test_what_is_no_whole_arena_is_refused(data: bytes, problem: str) -> None:
    """Whatever is wrong with a file, the error is typed."""
    with pytest.raises(LayoutError, match=problem):
        Table.parse(memoryview(data))


def test_difference_names_what_comes_first() -> None:
    """A missing, another and an additional tensor are told apart."""
    one, two = Spec(torch.float32, (2,)), Spec(torch.float64, (2, 3))
    assert difference({"a": one}, {"a": one}) is None
    assert difference({"a": one}, {}) == "lacks 'a'"
    assert difference({"a": one}, {"a": two}) == "has 'a' as float64[2, 3] instead of float32[2]"
    assert difference({}, {"b": one}) == "has 'b' in addition"
