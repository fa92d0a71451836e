"""Files that another host made and this one does not see at first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmrpc.errors import OutsideMountsError, PathNotFoundError, StaleReferenceError
from mmrpc.paths import visibility
from mmrpc.paths.visibility import look_again, until_visible


class Late:
    """A file that is found at the n-th look."""

    def __init__(self, looks: int, error: Exception) -> None:
        self.left = looks
        self.error = error

    def __call__(self) -> str:
        self.left -= 1
        if self.left:
            raise self.error
        return "found"


def test_what_is_there_is_found_at_once(root: Path) -> None:
    """Nothing is listed and nobody waits if the first look succeeds."""
    assert until_visible(lambda: 1, root="/nowhere", relative="x", timeout_s=0) == 1


def test_each_new_look_follows_a_listing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is listed before each new try: that is what makes NFS look again."""
    listed: list[str] = []
    monkeypatch.setattr(visibility.os, "listdir", lambda path: listed.append(path) or [])
    late = Late(3, PathNotFoundError("no such file", path="x"))
    assert until_visible(late, root="/m", relative="a/b", timeout_s=30) == "found"
    assert listed == ["/m/a", "/m/a"]


def test_the_nearest_existing_ancestor_is_listed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the directory is missing too, the one above it is listed, up to the mount."""
    listed: list[str] = []
    real = os.listdir

    def listdir(path: str) -> list[str]:
        entries = real(path)
        listed.append(path)
        return entries

    monkeypatch.setattr(visibility.os, "listdir", listdir)
    look_again(str(root), "sub/new/newer/file")
    look_again(str(root), "new/file")
    assert listed == [f"{root}/sub", str(root)]


def test_the_end_says_how_long_it_took() -> None:
    """After the deadline, the error is that of the last look and tells of the wait."""

    def find() -> None:
        raise PathNotFoundError("no such file", path="x", node="a")

    with pytest.raises(PathNotFoundError, match=r"no such file, 0\.1 s after the reference came"):
        until_visible(find, root="/nowhere", relative="x", timeout_s=0.1)
    with pytest.raises(PathNotFoundError, match=r"no such file$"):
        until_visible(find, root="/nowhere", relative="x", timeout_s=0)


def test_other_errors_are_not_waited_for() -> None:
    """A refusal stays one, however often it is repeated."""
    late = Late(2, OutsideMountsError("no", path="x"))
    with pytest.raises(OutsideMountsError):
        until_visible(late, root="/nowhere", relative="x", timeout_s=30)
    late = Late(2, StaleReferenceError("another file", path="x"))
    with pytest.raises(StaleReferenceError):
        until_visible(late, root="/nowhere", relative="x", timeout_s=30)


def test_a_handle_that_the_server_forgot_is_looked_up_again() -> None:
    """ESTALE means the old file of a name: the name may have a new one."""
    error = StaleReferenceError("the server no longer has that file", path="x")
    error.__cause__ = OSError(116, "Stale file handle")
    assert until_visible(Late(2, error), root="/nowhere", relative="x", timeout_s=30) == "found"
