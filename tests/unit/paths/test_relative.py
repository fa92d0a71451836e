"""Text that may be a path in a mount, and text that may not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrpc.errors import OutsideMountsError
from mmrpc.paths.relative import is_relative, split_relative

HOSTILE = json.loads((Path(__file__).parents[2] / "hostile" / "paths.json").read_text())


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda h: h["why"])
def test_hostile_text_is_refused(hostile: dict[str, str]) -> None:
    """Every text of the folder is an OutsideMountsError that names mount and node."""
    with pytest.raises(OutsideMountsError) as caught:
        split_relative(hostile["path"], mount="data", node="a")
    assert (caught.value.mount, caught.value.node) == ("data", "a")
    assert not is_relative(hostile["path"])


@pytest.mark.parametrize("text", ["file", "a/b/c", "...", "a b", "ü", "a:b", "-", "~", "%2e%2e"])
def test_ordinary_names_are_taken(text: str) -> None:
    """What merely looks odd is a file name like any other."""
    assert split_relative(text) == text.split("/")


def test_a_path_beyond_any_file_system_is_refused() -> None:
    """The error does not repeat megabytes that somebody sent."""
    with pytest.raises(OutsideMountsError) as caught:
        split_relative("a" * 1_000_000)
    assert len(str(caught.value)) < 5000


@given(st.text(max_size=40))
def test_what_is_taken_stays_below(text: str) -> None:
    """Joined to a directory, no accepted text normalises to a place outside of it."""
    if is_relative(text):
        joined = os.path.normpath(os.path.join("/mount", text))
        assert joined == f"/mount/{text}"
