"""Manifests: text that says what is there, and text that lies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrpc.errors import LayoutError
from mmrpc.paths.manifest import Entry, Manifest

DIGEST = "sha256:" + "0" * 64


@given(
    st.dictionaries(
        st.from_regex(r"\A[a-zü ]{1,8}(/[a-z]{1,8}){0,2}\Z"),
        st.builds(Entry, st.integers(0, 2**62), st.from_regex(r"\Asha256:[0-9a-f]{64}\Z")),
    )
)
def test_what_is_written_is_read(files: dict[str, Entry]) -> None:
    """A manifest survives its text, and the order of its files does not matter."""
    manifest = Manifest(files)
    assert Manifest.from_json(manifest.to_json()) == manifest
    backwards = Manifest(dict(reversed(files.items())))
    assert backwards.to_json() == manifest.to_json()


def text(files: Any, form: Any = 1) -> str:
    return json.dumps({"mmrpc_manifest": form, "files": files})


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        text({}, 2),
        text([]),
        text({"x": None}),
        text({"x": {}}),
        text({"../x": {"size_bytes": 1, "digest": DIGEST}}),
        text({"/etc/passwd": {"size_bytes": 1, "digest": DIGEST}}),
        text({"x": {"size_bytes": -1, "digest": DIGEST}}),
        text({"x": {"size_bytes": True, "digest": DIGEST}}),
        text({"x": {"size_bytes": 1.5, "digest": DIGEST}}),
        text({"x": {"size_bytes": 1, "digest": "md5:0"}}),
        text({"x": {"size_bytes": 1, "digest": DIGEST + "\n"}}),
        text({"x": {"size_bytes": 1, "digest": 7}}),
        b"\xff\xfe",
    ],
)
def test_what_is_none_is_refused(bad: str | bytes) -> None:
    """Malformed text, paths that lead elsewhere, and impossible sizes are one typed error."""
    with pytest.raises(LayoutError):
        Manifest.from_json(bad)
