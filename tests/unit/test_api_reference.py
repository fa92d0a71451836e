"""docs/api.md is what the code says, and the code says something of every public name."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from scripts import api_reference
from scripts.api_reference import PAGE, ROOMS, members, public_names, render


def test_the_page_is_up_to_date() -> None:
    """Whoever changes a signature or a docstring writes the page again."""
    assert PAGE.read_text() == render() + "\n", "run python -m scripts.api_reference"


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_an_entry(room: str) -> None:
    """A new name belongs to a group of the page."""
    entries = [
        line.strip("# `") for line in PAGE.read_text().splitlines() if line.startswith("###")
    ]
    assert set(public_names(room)) <= set(entries)


def public(room: str) -> Iterator[Any]:
    for name in public_names(room):
        value = getattr(importlib.import_module(room), name)
        yield pytest.param(value, id=f"{room}.{name}")


PUBLIC = [parameter for room in ROOMS for parameter in public(room)]


@pytest.mark.parametrize("value", PUBLIC)
def test_everything_is_told_in_a_sentence(value: Any) -> None:
    """No public function, class or member is without a docstring."""
    sentences = {value.__name__: api_reference.first_sentence(value)}
    if inspect.isclass(value):
        sentences.update(members(value))
    for name, sentence in sentences.items():
        assert sentence.endswith((".", "?")), name


@pytest.mark.parametrize("value", [p for p in PUBLIC if inspect.isclass(p.values[0])])
def test_attributes_are_told(value: type) -> None:
    """What a class sets on itself is an argument of it, or its docstring says what it is."""
    told = {name.partition("(")[0] for name, _ in members(value)}
    told |= set(inspect.signature(value).parameters)
    assert {name for owner in value.__mro__ for name in assigned(owner)} <= told


def assigned(cls: type) -> Iterator[str]:
    """Public names that the methods of a class assign to attributes of ``self``."""
    if not cls.__module__.startswith("mmrpc."):
        return
    for node in ast.walk(ast.parse(inspect.getsource(cls))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner, _, name = ast.unparse(node).rpartition(".")
            if owner == "self" and not name.startswith("_"):
                yield name


def test_signatures_read_as_they_are_written() -> None:
    """Types, defaults, bare stars, and the keywords of a `TypedDict` are shown."""
    page = PAGE.read_text()
    assert "path_report() -> PathReport" in page
    assert "    *,\n    dtype: torch.dtype | None = None," in page
    assert "`zeros(*size, shape=None, dtype=..., device=..., filename=...," in page
    assert "0x" not in page
