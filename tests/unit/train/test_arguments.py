"""What users pass is refused by name before anything is made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from mmrpc.errors import ConfigError
from mmrpc.train import arguments

NAN = math.nan


@pytest.mark.parametrize("value", [True, None, 1.0, NAN, "1", 0, -1, torch.tensor(3)])
def test_whole_numbers(value) -> None:
    """Only whole numbers that are large enough are taken; a bool is none."""
    assert arguments.whole_number("n", np.int64(3), 1) == 3
    with pytest.raises(ConfigError, match=r"^n: it must be a whole number of at least 1, not "):
        arguments.whole_number("n", value, 1)


@pytest.mark.parametrize("value", [True, None, "1", 1j, torch.ones(3), torch.tensor(1j), 10**400])
def test_numbers(value) -> None:
    """A tensor of one element is a number too, with or without a graph."""
    assert arguments.number("x", torch.tensor(2.5, requires_grad=True)) == 2.5
    assert math.isnan(arguments.number("x", NAN))
    with pytest.raises(ConfigError, match=r"^x: it must be a number, not "):
        arguments.number("x", value)


@pytest.mark.parametrize("value", [NAN, -1, -math.inf, "1", None])
def test_seconds(value) -> None:
    """A time is not negative, and may have no end."""
    assert arguments.seconds("t_s", math.inf) == math.inf
    assert arguments.seconds("t_s", 0) == 0
    with pytest.raises(ConfigError, match=r"^t_s: it must be a number"):
        arguments.seconds("t_s", value)


@pytest.mark.parametrize("value", [0, -1, NAN, math.inf])
def test_positive(value) -> None:
    """Only what can be divided by is positive."""
    assert arguments.positive("w", 5) == 5.0
    with pytest.raises(ConfigError, match=r"^w: it must be positive and finite, not "):
        arguments.positive("w", value)


@pytest.mark.parametrize("value", [1, "true", None, []])
def test_choices(value) -> None:
    """1 is not True."""
    arguments.one_of("flag", True, (True, False))
    with pytest.raises(ConfigError, match=r"^flag: it must be True or False, not "):
        arguments.one_of("flag", value, (True, False))


@pytest.mark.parametrize("value", ["", None, 5, b"x"])
def test_texts(value) -> None:
    """A name is a text that is not empty."""
    assert arguments.text("name", "ü") == "ü"
    with pytest.raises(ConfigError, match=r"^name: it must be a text that is not empty, not "):
        arguments.text("name", value)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("value", [Unprintable(), torch.ones(100, 100), "x" * 1000])
def test_what_cannot_be_shown_is_named_by_its_class(value) -> None:
    """The error is one sentence whatever was passed."""
    with pytest.raises(ConfigError, match=f"not a {type(value).__name__}$"):
        arguments.instance("module", value, nn.Module)
