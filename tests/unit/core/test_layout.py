"""The arithmetic of dense tensors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrpc.core.layout import (
    DTYPES,
    Layout,
    alignment_bytes,
    contiguous_strides,
    dtype_name,
    numel,
    parse_size,
    span_elements,
)
from mmrpc.errors import LayoutError
from tests.unit.core.tensors import shapes, steps

F32 = torch.float32


def test_every_dtype_that_raw_bytes_can_hold_has_a_name() -> None:
    """All of torch's dtypes are known but the quantized ones."""
    for dtype in vars(torch).values():
        if isinstance(dtype, torch.dtype):
            known = "torch.q" not in str(dtype)
            assert (dtype in DTYPES.values()) is known
            if known:
                assert DTYPES[dtype_name(dtype)] is dtype


def test_name_of_what_is_no_dtype() -> None:
    """A wrong dtype is told from one that cannot be."""
    with pytest.raises(TypeError, match=r"must be a torch\.dtype, not None"):
        dtype_name(None)
    with pytest.raises(LayoutError, match="Dequantize"):
        dtype_name(torch.qint8)


@given(shape=shapes)
def test_strides_are_torchs(shape: tuple[int, ...]) -> None:
    """A new tensor has the strides that torch gives one."""
    plain = torch.empty(shape)
    assert contiguous_strides(shape) == plain.stride()
    assert numel(shape) == plain.numel()
    assert Layout.contiguous(F32, shape).span_bytes == plain.untyped_storage().nbytes()


@given(data=st.data())
def test_span_reaches_the_last_element(data: st.DataObject) -> None:
    """The span of any view ends behind the largest place that an index of it leads to."""
    view = torch.arange(120.0).view(2, 3, 4, 5)
    for _ in range(data.draw(st.integers(0, 3))):
        method, args = data.draw(steps(tuple(view.shape)))
        view = getattr(view, method)(*args)
    span = span_elements(view.shape, view.stride())
    if view.numel():
        assert view.storage_offset() + span == int(view.max()) + 1
    else:
        assert span == 0
    layout = Layout.of(view, 8)
    assert layout.end_bytes == (8 + 4 * (view.storage_offset() + span) if span else 0)
    assert layout.is_contiguous is (view.stride() == contiguous_strides(view.shape))


def test_layout_of_a_lazy_view() -> None:
    """Conjugates and negatives are noted, since the bytes do not show them."""
    plain = torch.ones(3, dtype=torch.complex64)
    assert Layout.of(plain.conj(), 0).conj
    assert Layout.of(plain.conj().imag, 0).neg
    assert not Layout.of(plain, 0).conj


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "text"),
    [
        ((2,), (1, 1), 0, "does not go with strides"),
        ((1,) * 65, (1,) * 65, 0, "does not go with strides"),
        ((-1,), (1,), 0, "not negative"),
        ((2,), (-1,), 0, "not negative"),
        ((2,), (1,), -4, "not negative"),
        ((2.0,), (1,), 0, "not negative"),
        ((True,), (1,), 0, "not negative"),
        ((2**40, 2**40), (2**40, 1), 0, "larger than any file"),
        ((2**62, 2**62), (0, 0), 0, "larger than any file"),
        ((2,), (2**62,), 0, "larger than any file"),
        ((2,), (1,), 2**63 - 4, "larger than any file"),
        ((2,), (1,), 2, "does not suit"),
    ],
)
def test_bad_numbers(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, text: str
) -> None:
    """Numbers that cannot be are refused before anyone computes with them."""
    with pytest.raises(LayoutError, match=text):
        Layout(F32, shape, strides, offset).check()


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [(torch.uint8, 1), (torch.bfloat16, 2), (torch.complex64, 4), (torch.complex128, 8)],
)
def test_offset_suits_the_dtype(dtype: torch.dtype, nbytes: int) -> None:
    """An offset is a multiple of the alignment, for complex numbers that of their parts."""
    assert alignment_bytes(dtype) == nbytes
    assert Layout.contiguous(dtype, (2,), nbytes).offset_bytes == nbytes
    if nbytes > 1:
        with pytest.raises(LayoutError, match=f"multiple of {nbytes}"):
            Layout.contiguous(dtype, (2,), nbytes // 2)


@pytest.mark.parametrize(
    "size",
    [
        (2, 3),
        ((2, 3),),
        ([2, 3],),
        (torch.Size([2, 3]),),
        (torch.tensor([2, 3]),),
        (np.array([2, 3]),),
        (torch.tensor(2), np.int64(3)),
        (range(2, 4),),
    ],
)
def test_forms_of_a_size(size: tuple[object, ...]) -> None:
    """Sizes are given as torch takes them: integers, or one sequence of them."""
    assert parse_size(size) == (2, 3)
    if len(size) == 1:
        assert parse_size((), size[0]) == (2, 3)


def test_forms_of_no_dimension() -> None:
    """An empty sequence is the shape of a scalar, and no argument is a mistake."""
    assert parse_size(((),)) == parse_size((), ()) == ()
    with pytest.raises(TypeError, match="a size is needed"):
        parse_size(())


@pytest.mark.parametrize("size", [("a",), ((2.0,),), (2.5,), (None,), ((2, "3"),), (object(),)])
def test_size_that_is_none(size: tuple[object, ...]) -> None:
    """What is no integer is a TypeError, as for torch."""
    with pytest.raises(TypeError, match="integers"):
        parse_size(size)


def test_size_given_twice() -> None:
    """Arguments and shape= exclude each other."""
    with pytest.raises(TypeError, match="not both"):
        parse_size((2,), (3,))


@pytest.mark.parametrize("size", [(-1,), ((2, -3),), (torch.tensor([[2], [-1]]),)])
def test_negative_size(size: tuple[object, ...]) -> None:
    """A negative size is an error that is both a ValueError and a RuntimeError."""
    with pytest.raises(LayoutError, match="negative size") as caught:
        parse_size(size)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)


def test_nested_size() -> None:
    """A matrix of integers is a nested shape, whatever kind of integers."""
    sizes = parse_size((torch.tensor([[2, 3], [1, 3]], dtype=torch.int16),))
    assert isinstance(sizes, torch.Tensor)
    assert sizes.dtype is torch.int64
    assert sizes.tolist() == [[2, 3], [1, 3]]
    with pytest.raises(LayoutError, match="2-D integer tensor"):
        parse_size((torch.ones(2, 2),))


def test_it_is_made_once() -> None:
    """What has the same layout as before gives the very object, and a view's differs."""
    x = torch.ones(4, 6)
    assert Layout.of(x, 64) is Layout.of(torch.zeros(4, 6), 64)
    assert Layout.of(x, 64) != Layout.of(x, 0)
    assert Layout.of(x.t(), 64) != Layout.of(x, 64)
    packed = Layout.of(x, 64).packed
    assert Layout.unpack(packed) is Layout.unpack(pickle.loads(pickle.dumps(packed)))


def test_pickled_layout() -> None:
    """A pickle holds the fields only, not what was computed of them, and is checked."""
    layout = Layout(F32, (2, 3), (1, 2), 8)
    fresh = pickle.dumps(layout)
    assert (layout.end_bytes, layout.span_bytes) == (32, 24)
    assert pickle.dumps(layout) == fresh
    assert pickle.loads(fresh) == layout
    with pytest.raises(LayoutError, match="not negative"):
        pickle.loads(pickle.dumps(Layout(F32, (-2,), (1,))))
