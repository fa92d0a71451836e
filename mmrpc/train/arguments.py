"""Checks of what users pass, before anything is made of it."""

from __future__ import annotations

import contextlib
import math
from numbers import Integral, Real
from typing import Any

import torch

from mmrpc.errors import ConfigError


def whole_number(name: str, value: Any, least: int) -> int:
    """Gives a whole number back.

    Raises:
        ConfigError: If it is none, or less than ``least``; True and False are none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise _refusal(name, f"a whole number of at least {least}", value)
    return int(value)


def number(name: str, value: Any) -> float:
    """Gives a number back as a float, also that of a tensor of one element.

    Raises:
        ConfigError: If it is none; True and False are none.
    """
    if not isinstance(value, bool) and isinstance(value, (Real, torch.Tensor)):
        with contextlib.suppress(ValueError, RuntimeError, OverflowError, TypeError):
            return float(value.detach() if isinstance(value, torch.Tensor) else value)
    raise _refusal(name, "a number", value)


def seconds(name: str, value: Any) -> float:
    """Gives a length of time back, which may be infinite, as a float.

    Raises:
        ConfigError: If it is no number, or negative.
    """
    found = number(name, value)
    if not found >= 0:
        raise _refusal(name, "a number of seconds that is not negative", value)
    return found


def positive(name: str, value: Any) -> float:
    """Gives a positive, finite number back as a float.

    Raises:
        ConfigError: If it is none.
    """
    found = number(name, value)
    if not 0 < found < math.inf:
        raise _refusal(name, "positive and finite", value)
    return found


def one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuses what is not among the choices.

    Raises:
        ConfigError: Naming them.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise _refusal(name, " or ".join(map(repr, choices)), value)


def text(name: str, value: Any) -> str:
    """Gives a text back.

    Raises:
        ConfigError: If it is none, or empty.
    """
    if not isinstance(value, str) or not value:
        raise _refusal(name, "a text that is not empty", value)
    return value


def instance(name: str, value: Any, kind: type) -> None:
    """Refuses what is not of a class.

    Raises:
        ConfigError: Naming the class.
    """
    if not isinstance(value, kind):
        raise _refusal(name, f"an instance of {kind.__module__}.{kind.__qualname__}", value)


def _refusal(name: str, needed: str, value: Any) -> ConfigError:
    try:
        shown = repr(value)
    except Exception:
        shown = f"a {type(value).__name__}"
    if len(shown) > 60 or "\n" in shown:
        shown = f"a {type(value).__name__}"
    return ConfigError(f"it must be {needed}, not {shown}", key=name)
