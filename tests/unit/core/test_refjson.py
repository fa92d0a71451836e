"""References as JSON: stable, validated, and nothing is run by reading one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrpc import TensorRef
from mmrpc.core.layout import DTYPES, Layout
from mmrpc.core.location import (
    FileIdentity,
    FileLocation,
    Location,
    MemoryLocation,
    Mode,
    MountLocation,
)
from mmrpc.core.nested import NestedLayout
from mmrpc.errors import LayoutError

EXAMPLE = {
    "mmrpc": 1,
    "location": {
        "kind": "file",
        "host": "0123456789abcdef",
        "path": "/data/x.bin",
        "identity": {"device": 1, "inode": 2, "generation": "6800ff"},
    },
    "layout": {"kind": "dense", "dtype": "float32", "shape": [2, 3]},
    "mode": "r+",
}

_hosts = st.text("0123456789abcdef", min_size=16, max_size=16)
_counts = st.integers(0, 2**63 - 1)
_numbers = st.integers(0, 2**64 - 1)
_texts = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=50
)
_identities = st.builds(FileIdentity, _numbers, _numbers, st.binary(min_size=1, max_size=40))
_locations: st.SearchStrategy[Location] = st.one_of(
    st.builds(FileLocation, _hosts, _texts.map(lambda text: f"/{text}"), _identities),
    st.builds(
        MemoryLocation, _hosts, st.integers(1, 2**31 - 1), _numbers, st.integers(0, 99), _numbers
    ),
    st.builds(MountLocation, _texts, _texts, _hosts, _identities, _counts, _texts | st.just("")),
)


@st.composite
def _dense(draw: st.DrawFn) -> Layout:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    offset = draw(st.integers(0, 99)) * dtype.itemsize
    layout = Layout.contiguous(dtype, shape, offset)
    if draw(st.booleans()):
        layout = Layout(dtype, shape, tuple(reversed(layout.strides)), offset, draw(st.booleans()))
    return layout.check()


@st.composite
def _nested(draw: st.DrawFn) -> NestedLayout:
    width = draw(st.integers(1, 3))
    rows = draw(st.lists(st.tuples(*[st.integers(0, 5)] * width), min_size=1, max_size=3))
    layout = NestedLayout.contiguous(torch.float32, torch.tensor(rows), 8)
    if draw(st.booleans()):
        offsets = tuple(offset + 1 for offset in layout.offsets)
        layout = NestedLayout(layout.dtype, layout.sizes, layout.strides, offsets, 8)
    return layout.check()


@given(location=_locations, layout=_dense() | _nested(), mode=st.sampled_from(Mode))
def test_round_trip(location: Location, layout: Layout | NestedLayout, mode: Mode) -> None:
    """Every reference is written and read back as it was, in one line."""
    reference = TensorRef(location, layout, mode)
    text = reference.to_json()
    assert TensorRef.from_json(text) == reference
    assert TensorRef.from_json(text.encode()) == reference
    assert "\n" not in text
    assert json.loads(text)["mmrpc"] == 1


def test_form_is_stable() -> None:
    """This form was written once, and is read and written for ever."""
    text = json.dumps(EXAMPLE, separators=(",", ":"))
    reference = TensorRef.from_json(text)
    assert reference.location == FileLocation(
        "0123456789abcdef", "/data/x.bin", FileIdentity(1, 2, b"h\0\xff")
    )
    assert reference.layout == Layout.contiguous(torch.float32, (2, 3))
    assert reference.mode is Mode.WRITE
    assert json.loads(reference.to_json()) == EXAMPLE


def changed(path: str, value: Any) -> str:
    """The example with one value changed, or with ``...`` removed."""
    form = json.loads(json.dumps(EXAMPLE))
    *parents, last = path.split(".")
    at = form
    for parent in parents:
        at = at[parent]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(form)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mmrpc", 2),
        ("mode", "w"),
        ("mode", ...),
        ("extra", 1),
        ("location", ...),
        ("location.kind", "url"),
        ("location.host", "no"),
        ("location.path", "relative"),
        ("location.path", "/a\0b"),
        ("location.path", "/" + "x" * 5000),
        ("location.path", 3),
        ("location.identity", ...),
        ("location.identity.inode", -1),
        ("location.identity.inode", 2**64),
        ("location.identity.inode", "2"),
        ("location.identity.generation", "xyz"),
        ("location.credentials", "secret"),
        ("layout.kind", "sparse"),
        ("layout.dtype", "float33"),
        ("layout.dtype", "qint8"),
        ("layout.shape", [-1]),
        ("layout.shape", [1.5]),
        ("layout.shape", [True]),
        ("layout.shape", ["2"]),
        ("layout.shape", [1] * 65),
        ("layout.shape", [2**40, 2**40]),
        ("layout.strides", [1]),
        ("layout.strides", [-1, 1]),
        ("layout.offset_bytes", 2),
        ("layout.offset_bytes", -4),
        ("layout.conj", 1),
    ],
)
def test_invalid(path: str, value: Any) -> None:
    """Whatever is wrong with it is a LayoutError."""
    with pytest.raises(LayoutError):
        TensorRef.from_json(changed(path, value))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "\0", "[" * 5000, b"\xff"])
def test_no_json(text: str | bytes) -> None:
    """Text that is no JSON, or not of an object, is a LayoutError too."""
    with pytest.raises(LayoutError, match="the text is no reference"):
        TensorRef.from_json(text)


@given(st.text() | st.binary())
def test_anything(text: str | bytes) -> None:
    """No text at all leads to another kind of error."""
    with pytest.raises(LayoutError):
        TensorRef.from_json(text)


@pytest.mark.parametrize(
    "layout",
    [
        {"kind": "nested", "dtype": "float32", "sizes": [[2], [2, 3]]},
        {"kind": "nested", "dtype": "float32", "sizes": [[2]], "strides": [[1]], "offsets": []},
        {"kind": "nested", "dtype": "float32", "sizes": [[2]], "strides": [], "offsets": [0]},
        {"kind": "nested", "dtype": "float32", "sizes": [[-2]]},
        {"kind": "nested", "dtype": "float32", "sizes": [[2**40, 2**40]]},
    ],
)
def test_invalid_nested(layout: dict[str, Any]) -> None:
    """A nested layout that cannot be is refused."""
    with pytest.raises(LayoutError):
        TensorRef.from_json(changed("layout", layout))


def test_error_says_where() -> None:
    """The text of the error leads to the mistake."""
    with pytest.raises(LayoutError, match=r"location\.file\.identity\.inode"):
        TensorRef.from_json(changed("location.identity.inode", -1))
