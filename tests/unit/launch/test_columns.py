"""Rows of text as aligned columns."""

from __future__ import annotations

from mmrpc.launch.columns import aligned


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    """Cells stand below each other, and no line ends with a space."""
    rows = [("NODE", "PATH"), ("a", "/a long/path"), ("trainer", "")]
    assert list(aligned(rows)) == ["NODE     PATH", "a        /a long/path", "trainer"]


def test_no_rows_are_no_lines() -> None:
    """There is nothing to measure."""
    assert list(aligned([])) == []
