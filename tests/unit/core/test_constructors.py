"""The constructors of new tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrpc import MemoryMappedTensor, errors

M = MemoryMappedTensor
VALUES = {"empty": 0, "zeros": 0, "ones": 1, "full": 5}
NAMES = list(VALUES)


def maker(name: str) -> Callable[..., MemoryMappedTensor]:
    if name == "full":
        return lambda *size, **kwargs: M.full(*size, fill_value=5, **kwargs)
    return getattr(M, name)


@pytest.mark.parametrize("place", ["file", "memory"])
@pytest.mark.parametrize("name", NAMES)
class TestNew:
    """empty, zeros, ones, full."""

    def test_sizes(self, name: str, place: str, tmp_path: Path) -> None:
        """The size is given as integers, as one sequence, or as shape=."""
        make = maker(name)
        forms = [((2, 3), {}), (((2, 3),), {}), (([2, 3],), {}), ((torch.Size([2, 3]),), {})]
        forms += [((), {"shape": (2, 3)}), ((np.array([2, 3]),), {})]
        for number, (size, kwargs) in enumerate(forms):
            filename = tmp_path / str(number) if place == "file" else None
            x = make(*size, filename=filename, **kwargs)
            assert type(x) is M
            assert x.shape == (2, 3)
            assert x.is_contiguous()
            assert (x == VALUES[name]).all()
            if filename:
                assert filename.stat().st_size == 24

    def test_dtype(self, name: str, place: str, tmp_path: Path) -> None:
        """The dtype is the default one unless given, also for an integer fill value."""
        filename = tmp_path / "x" if place == "file" else None
        make = maker(name)
        assert make(2).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert make(2, filename=filename).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert make(2, dtype=torch.int16).dtype is torch.int16

    def test_edge_sizes(self, name: str, place: str, tmp_path: Path) -> None:
        """A scalar has one element; no elements is an empty tensor, in a file of 0 bytes."""
        make = maker(name)
        files = [tmp_path / n if place == "file" else None for n in ("a", "b", "c")]
        assert make((), filename=files[0]).shape == ()
        assert make(0, filename=files[1]).shape == (0,)
        assert make(2, 0, 3, filename=files[2]).shape == (2, 0, 3)
        if place == "file":
            assert [file.stat().st_size for file in files] == [4, 0, 0]

    def test_default_device_is_ignored(self, name: str, place: str, tmp_path: Path) -> None:
        """It is on the CPU, whatever torch would do."""
        with torch.device("meta"):
            x = maker(name)(2, 3, filename=tmp_path / "x" if place == "file" else None)
            y = getattr(M, f"{name}_like")(x, *([5] if name == "full" else []))
        assert x.device.type == y.device.type == "cpu"
        assert (x == VALUES[name]).all()
        assert (y == VALUES[name]).all()

    def test_mistakes(self, name: str, place: str, tmp_path: Path) -> None:
        """What cannot be is refused by the kind of error that torch has, and makes no file."""
        make = maker(name)
        filename = tmp_path / "x" if place == "file" else None
        for size, kwargs, kind in (
            ((), {}, TypeError),
            ((-1,), {}, RuntimeError),
            ((2.5,), {}, TypeError),
            ((2,), {"device": "cuda"}, RuntimeError),
            ((2,), {"file_name": "x"}, TypeError),
            ((2,), {"dtype": torch.qint8}, ValueError),
            ((2,), {"dtype": "float32"}, TypeError),
        ):
            with pytest.raises(kind):
                make(*size, filename=filename, **kwargs)
        assert os.listdir(tmp_path) == []
        assert make(2, device="cpu").device == make(2, device=torch.device("cpu")).device


@pytest.mark.parametrize("name", NAMES)
def test_file_exists(name: str, tmp_path: Path) -> None:
    """A name in use is refused, or replaced if that is asked for; *_like never replace."""
    make = maker(name)
    old = make(2, filename=tmp_path / "x")
    with pytest.raises(RuntimeError, match="existsok=True"):
        make(3, filename=tmp_path / "x")
    with pytest.raises(RuntimeError, match="existsok=True"):
        getattr(M, f"{name}_like")(old, *([5] if name == "full" else []), filename=old.filename)
    new = make(3, filename=tmp_path / "x", existsok=True, durable=True)
    assert (tmp_path / "x").stat().st_size == 12
    new.fill_(9)
    assert (old == VALUES[name]).all()


def test_full_needs_a_value() -> None:
    """There is no default for what to fill with."""
    with pytest.raises(TypeError, match="fill_value"):
        M.full(3)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, torch.bool),
        (1 + 2j, torch.complex64),
        (float("nan"), torch.bfloat16),
        (-1, torch.int8),
    ],
)
def test_fill_values(value: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Any number is a fill value that torch can convert."""
    x = M.full((2, 2), fill_value=value, dtype=dtype, filename=tmp_path / "x")
    assert repr(x.tolist()) == repr(torch.full((2, 2), value, dtype=dtype).tolist())


def test_fill_that_does_not_fit(tmp_path: Path) -> None:
    """A value that the dtype cannot hold is torch's error, and leaves no file."""
    with pytest.raises(RuntimeError):
        M.full(3, fill_value=2**40, dtype=torch.int8, filename=tmp_path / "x")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", NAMES)
def test_like(name: str, tmp_path: Path) -> None:
    """The result is contiguous, has shape and dtype of the input, and takes only filename."""
    source = torch.ones(4, 3, 2, dtype=torch.int16).transpose(0, 2)
    value = [5] if name == "full" else []
    like = getattr(M, f"{name}_like")
    for filename in (None, tmp_path / "x"):
        x = like(source, *value, filename=filename)
        assert (x.shape, x.dtype, x.is_contiguous()) == (source.shape, torch.int16, True)
        assert (x == VALUES[name]).all()
    with pytest.raises(TypeError):
        like(source, *value, dtype=torch.int8)


def test_larger_than_a_block(tmp_path: Path) -> None:
    """A fill that is written in several pieces reaches the last element."""
    count = (8 << 20) // 8 * 2 + 5
    x = M.full(count, fill_value=3, dtype=torch.int64, filename=tmp_path / "x")
    assert (x == 3).all()


def test_zeros_take_their_space(tmp_path: Path) -> None:
    """Zeros are reserved, not only promised."""
    x = M.zeros(1 << 20, dtype=torch.uint8, filename=tmp_path / "x")
    assert os.stat(x.filename).st_blocks * 512 >= 1 << 20


def test_errors_are_ours(tmp_path: Path) -> None:
    """Errors carry the path."""
    M.zeros(2, filename=tmp_path / "x")
    with pytest.raises(errors.PathExistsError) as caught:
        M.zeros(2, filename=tmp_path / "x")
    assert caught.value.path == str(tmp_path / "x")
