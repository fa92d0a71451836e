"""Contained opening, by the kernel's call and by the walk that stands in for it."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mmrpc.errors import (
    NotRegularFileError,
    OutsideMountsError,
    PathError,
    PathNotFoundError,
    PathNotReadableError,
    PathNotWritableError,
)
from mmrpc.paths import beneath
from mmrpc.paths.beneath import look_beneath, open_beneath
from tests.needs import needs

from .test_relative import HOSTILE


@pytest.fixture(params=["openat2", "walk"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "walk":
        monkeypatch.setattr(beneath, "has_openat2", lambda: False)
    elif not beneath.has_openat2():
        pytest.skip("this kernel, or whoever confines us, has no openat2")


pytestmark = pytest.mark.usefixtures("_way")


def read(root: Path, relative: str) -> bytes:
    fd = open_beneath(str(root), relative)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_opens_what_is_inside(root: Path) -> None:
    """Files at any depth open, without being inherited by children."""
    assert read(root, "file") == b"inside"
    assert read(root, "sub/file") == b"inside sub"
    fd = open_beneath(str(root), "file")
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_the_mount_itself_may_be_behind_a_link(root: Path, tmp_path: Path) -> None:
    """The config's own path is trusted: an administrator's link there is followed."""
    (tmp_path / "alias").symlink_to(root)
    assert read(tmp_path / "alias", "sub/file") == b"inside sub"


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda h: h["why"])
def test_hostile_text_opens_nothing(root: Path, hostile: dict[str, str]) -> None:
    """No text gets out of the mount."""
    before = open_fds()
    with pytest.raises(OutsideMountsError):
        open_beneath(str(root), hostile["path"], mount="data", node="a")
    assert open_fds() == before


LINKS: dict[str, Callable[[Path], str]] = {
    "out by an absolute link": lambda root: str(root.parent / "secret"),
    "out by a relative link": lambda root: "../secret",
    "to the inside": lambda root: "file",
    "to the inside, absolutely": lambda root: str(root / "file"),
    "to a descriptor": lambda root: "/proc/self/fd/0",
    "to itself": lambda root: "link",
    "to a device": lambda root: "/dev/zero",
    "to nothing": lambda root: "missing",
}


@pytest.mark.parametrize("target", LINKS.values(), ids=LINKS)
def test_no_link_is_followed(root: Path, target: Callable[[Path], str]) -> None:
    """A symbolic link is refused wherever it leads, and the error tells what to do."""
    (root / "link").symlink_to(target(root))
    before = open_fds()
    with pytest.raises(OutsideMountsError, match="behind the link"):
        open_beneath(str(root), "link", mount="data")
    assert open_fds() == before


@pytest.mark.parametrize("target", ["..", "sub", "/", "/proc/self"])
def test_no_directory_link_is_followed(root: Path, target: str) -> None:
    """A link on the way is refused as one at the end is."""
    (root / "way").symlink_to(target)
    with pytest.raises(OutsideMountsError):
        open_beneath(str(root), "way/file")


def test_what_is_no_file_is_refused_without_waiting(root: Path) -> None:
    """Directories, FIFOs and sockets are named for what they are; a FIFO is not waited for."""
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.getcwd()
        os.chdir(root)
        try:
            server.bind("socket")
        finally:
            os.chdir(directory)
        for name, word in (("sub", "a directory"), ("fifo", "a FIFO"), ("socket", "a socket")):
            with pytest.raises(NotRegularFileError, match=word) as caught:
                open_beneath(str(root), name, mount="data", node="a", writable=True)
            assert (caught.value.mount, caught.value.node) == ("data", "a")


@needs("root")
def test_devices_are_not_even_opened(root: Path) -> None:
    """A device node in a mount is refused before its driver hears of it."""
    try:
        os.mknod(root / "tape", stat.S_IFCHR | 0o666, os.makedev(9, 0))
    except PermissionError as error:
        pytest.skip(f"no devices may be made here: {error}")
    # No driver has that number: opening it would be ENXIO rather than a look at its type.
    with pytest.raises(NotRegularFileError, match="a character device"):
        open_beneath(str(root), "tape")


def test_missing_things_are_named(root: Path) -> None:
    """A missing file, a missing directory, and a file in place of a directory."""
    for relative in ("missing", "missing/file", "file/below"):
        with pytest.raises(PathNotFoundError) as caught:
            open_beneath(str(root), relative, node="a")
        assert caught.value.path == f"{root}/{relative}"


def test_a_missing_mount_names_the_line_of_the_config(root: Path) -> None:
    """If the directory of the mount is missing, that is what the error is about."""
    with pytest.raises(PathNotFoundError, match=r"fix nodes\.a\.mounts\.data") as caught:
        open_beneath(str(root / "nowhere"), "file", mount="data", node="a")
    assert caught.value.path == str(root / "nowhere")
    with pytest.raises(PathNotFoundError, match="not a directory"):
        open_beneath(str(root / "file"), "file")


@needs("root")
def test_permissions_are_told_apart(root: Path) -> None:
    """For another user, reading and writing fail as what they are; root is not another user."""
    (root / "file").chmod(0o644)
    (root / "secret").write_bytes(b"")
    (root / "secret").chmod(0o600)
    for directory in (root, root.parent, root.parent.parent, root.parent.parent.parent):
        directory.chmod(directory.stat().st_mode | 0o755)
    outcomes = as_nobody(
        lambda: read(root, "file"),
        lambda: read(root, "secret"),
        lambda: open_beneath(str(root), "file", writable=True),
    )
    assert outcomes == ["inside", PathNotReadableError.__name__, PathNotWritableError.__name__]


def as_nobody(*calls: Callable[[], object]) -> list[str]:
    """What the calls give, or the class of what they raise, as an ordinary user."""
    outcomes = []
    os.seteuid(65534)
    try:
        for call in calls:
            try:
                result = call()
                outcomes.append(result.decode() if isinstance(result, bytes) else str(result))
            except PathError as error:
                outcomes.append(type(error).__name__)
    finally:
        os.seteuid(0)
    return outcomes


def test_looking_needs_no_permission_and_opens_nothing(root: Path) -> None:
    """A look gives a descriptor that can be identified, and not read."""
    fd = look_beneath(str(root), "sub/file")
    try:
        assert os.fstat(fd).st_ino == (root / "sub" / "file").stat().st_ino
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.read(fd, 1)
    finally:
        os.close(fd)


@needs("namespaces")
def test_another_file_system_below_the_mount_was_not_proven(root: Path) -> None:
    """What is mounted below the root is refused where only the root's own will do."""
    import subprocess

    mounted = root / "sub"
    subprocess.run(["mount", "-t", "tmpfs", "none", str(mounted)], check=True)
    try:
        (mounted / "file").write_bytes(b"elsewhere")
        assert read(root, "sub/file") == b"elsewhere"
        with pytest.raises(OutsideMountsError, match="another file system"):
            open_beneath(str(root), "sub/file", same_file_system=True)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
    fd = open_beneath(str(root), "sub/file", same_file_system=True)
    os.close(fd)


def test_a_race_of_links_never_gets_out(root: Path) -> None:
    """While a directory is swapped for a link to the outside, the secret is never read."""
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    (root / "evil").symlink_to(outside)
    (root / "good").mkdir()
    (root / "good" / "file").write_bytes(b"inside")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(root / "good", root / "spare")
            os.rename(root / "evil", root / "good")
            os.rename(root / "good", root / "evil")
            os.rename(root / "spare", root / "good")

    swapper = threading.Thread(target=swap)
    swapper.start()
    before = open_fds()
    seen: set[bytes | str] = set()
    try:
        for _ in range(2000):
            try:
                seen.add(read(root, "good/file"))
            except PathError as error:
                seen.add(type(error).__name__)
    finally:
        stop.set()
        swapper.join()
    assert seen <= {b"inside", "PathNotFoundError", "OutsideMountsError"}
    assert b"inside" in seen
    assert open_fds() == before
