"""Opening files safely, and making new ones that are complete or absent."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrpc import errors
from mmrpc.core import files, sweep
from tests.needs import needs
from tests.peers import Peer


@pytest.fixture(params=["unnamed", "part", "part, no hard links"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The three ways to make a file: by O_TMPFILE, or where a file system lacks that or links."""
    real_open = os.open

    def no_tmpfile(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE and os.path.isdir(path):
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real_open(path, flags, *args, **kwargs)

    def no_link(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, "not permitted")

    if request.param != "unnamed":
        monkeypatch.setattr(os, "open", no_tmpfile)
    if "no hard links" in request.param:
        monkeypatch.setattr(os, "link", no_link)
    return request.param


def make(path: Path, content: bytes, *, replace: bool = False, durable: bool = False) -> None:
    with files.new_file(str(path), replace=replace) as file:
        files.write(file.fd, [memoryview(content)], len(content), str(path))
        file.publish(durable=durable)


class TestNewFile:
    """A new file has its name when it is whole."""

    @pytest.mark.parametrize("durable", [False, True])
    def test_published(self, how: str, durable: bool, tmp_path: Path) -> None:
        """The file appears with its content, and nothing else does."""
        make(tmp_path / "x", b"abc", durable=durable)
        assert (tmp_path / "x").read_bytes() == b"abc"
        assert os.listdir(tmp_path) == ["x"]

    def test_no_name_before(self, how: str, tmp_path: Path) -> None:
        """While it is written, nothing has its name."""
        with files.new_file(str(tmp_path / "x")) as file:
            os.write(file.fd, b"abc")
            assert not (tmp_path / "x").exists()
            assert len(os.listdir(tmp_path)) == (0 if how == "unnamed" else 1)
            file.publish()

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_failure(self, how: str, error: type[BaseException], tmp_path: Path) -> None:
        """An exception while it is written leaves nothing at all."""

        def fail() -> None:
            with files.new_file(str(tmp_path / "x")) as file:
                os.write(file.fd, b"abc")
                raise error

        with pytest.raises(error):
            fail()
        assert os.listdir(tmp_path) == []

    def test_name_taken_before(self, how: str, tmp_path: Path) -> None:
        """A name in use is refused before anything is written."""
        (tmp_path / "x").write_bytes(b"old")
        with pytest.raises(errors.PathExistsError) as caught:
            make(tmp_path / "x", b"abc")
        assert isinstance(caught.value, FileExistsError)
        assert caught.value.errno == errno.EEXIST
        assert (tmp_path / "x").read_bytes() == b"old"

    def test_name_taken_meanwhile(self, how: str, tmp_path: Path) -> None:
        """Who publishes second gets the error, and the first one's file stays."""
        with files.new_file(str(tmp_path / "x")) as file:
            (tmp_path / "x").write_bytes(b"first")
            with pytest.raises(errors.PathExistsError):
                file.publish()
        assert (tmp_path / "x").read_bytes() == b"first"
        assert os.listdir(tmp_path) == ["x"]

    def test_replaced(self, how: str, tmp_path: Path) -> None:
        """Replacing gives the name to another inode; who has the old one open keeps it."""
        (tmp_path / "x").write_bytes(b"old")
        os.chmod(tmp_path / "x", 0o640)
        with open(tmp_path / "x", "rb") as old:
            make(tmp_path / "x", b"abc", replace=True)
            assert old.read() == b"old"
            assert os.fstat(old.fileno()).st_ino != os.stat(tmp_path / "x").st_ino
        assert (tmp_path / "x").read_bytes() == b"abc"
        assert stat.S_IMODE(os.stat(tmp_path / "x").st_mode) == 0o640
        assert os.listdir(tmp_path) == ["x"]

    def test_replacing_nothing(self, how: str, tmp_path: Path) -> None:
        """To replace what is not there is to make it."""
        make(tmp_path / "x", b"abc", replace=True)
        assert (tmp_path / "x").read_bytes() == b"abc"

    def test_permission_bits(self, how: str, tmp_path: Path) -> None:
        """A new file has the bits that the umask leaves of 0666."""
        before = os.umask(0o027)
        try:
            make(tmp_path / "x", b"abc")
        finally:
            os.umask(before)
        assert stat.S_IMODE(os.stat(tmp_path / "x").st_mode) == 0o640

    def test_one_of_many_threads_wins(self, how: str, tmp_path: Path) -> None:
        """Of threads that make one name, one succeeds, and the file is all its own."""
        outcomes: list[bytes | type] = []
        ready = threading.Barrier(8)

        def create(content: bytes) -> None:
            ready.wait()
            try:
                make(tmp_path / "x", content)
                outcomes.append(content)
            except errors.PathExistsError as error:
                outcomes.append(type(error))

        threads = [threading.Thread(target=create, args=(bytes([n]) * 999,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count(errors.PathExistsError) == 7
        (winner,) = [o for o in outcomes if isinstance(o, bytes)]
        assert (tmp_path / "x").read_bytes() == winner
        assert os.listdir(tmp_path) == ["x"]

    @pytest.mark.parametrize("replace", [False, True])
    @pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "fifo", "socket"])
    def test_name_of_something_else(self, kind: str, replace: bool, tmp_path: Path) -> None:
        """Only a regular file may have the name, and nothing is written through a link."""
        make_odd(kind, tmp_path)
        with pytest.raises(errors.NotRegularFileError):
            make(tmp_path / "x", b"abc", replace=replace)
        if "link" in kind:
            assert os.path.islink(tmp_path / "x")
            assert not (tmp_path / "target").exists() or not (tmp_path / "target").read_bytes()

    def test_no_directory(self, how: str, tmp_path: Path) -> None:
        """Where the directory is missing, that is what the error says; it is not made."""
        with pytest.raises(errors.PathNotFoundError, match="its directory does not exist"):
            make(tmp_path / "no" / "x", b"abc")
        assert os.listdir(tmp_path) == []

    def test_descriptors_are_closed(self, how: str, tmp_path: Path) -> None:
        """Neither success nor failure keeps a descriptor."""
        before = len(os.listdir("/proc/self/fd"))
        make(tmp_path / "x", b"abc")
        with pytest.raises(errors.PathExistsError):
            make(tmp_path / "x", b"abc")
        with pytest.raises(ValueError), files.new_file(str(tmp_path / "y")):
            raise ValueError
        assert len(os.listdir("/proc/self/fd")) == before

    def test_nul_in_the_name(self, tmp_path: Path) -> None:
        """A name that no file can have is not found, rather than cut short."""
        with pytest.raises(errors.PathNotFoundError):
            make(Path(f"{tmp_path}/a\0b"), b"abc")


def make_odd(kind: str, directory: Path) -> None:
    """Makes ``x``, which is no regular file."""
    path = directory / "x"
    if kind == "link":
        (directory / "target").touch()
        path.symlink_to(directory / "target")
    elif kind == "dangling link":
        path.symlink_to(directory / "target")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as server:
            before = os.getcwd()
            os.chdir(directory)  # a socket's path may have a hundred bytes only
            server.bind("x")
            os.chdir(before)


class TestOpening:
    """Opening changes nothing, follows nothing and waits for nothing."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Iterator[str]:
        (tmp_path / "file").write_bytes(b"abc")
        yield str(tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == b"abc"

    @pytest.mark.parametrize("writable", [False, True])
    def test_regular_file(self, path: str, writable: bool) -> None:
        """A regular file is opened as asked, and its descriptor is not inherited."""
        fd = files.open_regular(path, writable=writable)
        assert os.read(fd, 9) == b"abc"
        assert not os.get_inheritable(fd)
        if writable:
            os.pwrite(fd, b"abc", 0)
        else:
            with pytest.raises(OSError, match="Bad file"):
                os.pwrite(fd, b"abc", 0)
        os.close(fd)

    @pytest.mark.parametrize("writable", [False, True])
    @pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "fifo", "socket"])
    def test_something_else(self, kind: str, writable: bool, tmp_path: Path) -> None:
        """Anything else is refused at once, and no descriptor stays open."""
        make_odd(kind, tmp_path)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(errors.NotRegularFileError, match="it is"):
            files.open_regular(str(tmp_path / "x"), writable=writable)
        assert len(os.listdir("/proc/self/fd")) == before

    def test_device(self) -> None:
        """A device is no file to map."""
        with pytest.raises(errors.NotRegularFileError, match="a character device"):
            files.open_regular("/dev/zero")

    @pytest.mark.parametrize("writable", [False, True])
    def test_missing(self, writable: bool, tmp_path: Path) -> None:
        """A missing file is said to be missing, with what of its path exists."""
        with pytest.raises(errors.PathNotFoundError, match="Its directory exists"):
            files.open_regular(f"{tmp_path}/no", writable=writable)
        with pytest.raises(errors.PathNotFoundError, match=f"only '{tmp_path}' exists"):
            files.open_regular(f"{tmp_path}/a/b/c", writable=writable)
        assert os.listdir(tmp_path) == []

    def test_nul_in_the_name(self) -> None:
        """A name that no file can have is not found."""
        with pytest.raises(errors.PathNotFoundError):
            files.open_regular("/tmp/a\0b")

    @needs("root")
    def test_other_user(self, other_user: Peer, shared_dir: str) -> None:
        """What may not be read or written is said to be that, each with its own class."""
        path = f"{shared_dir}/x"
        Path(path).write_bytes(b"abc")
        os.chmod(path, 0o644)
        with pytest.raises(errors.PathNotWritableError, match="uid 65534"):
            other_user.call(open_writable, path)
        os.chmod(path, 0o600)
        with pytest.raises(errors.PathNotReadableError, match="uid 65534") as caught:
            other_user.call(files.open_regular, path)
        assert isinstance(caught.value, PermissionError)

    @needs("root")
    def test_directory_of_another_user(self, other_user: Peer, tmp_path: Path) -> None:
        """To create where one may not is a PathNotWritableError."""
        os.chmod(tmp_path, 0o755)
        with pytest.raises(errors.PathNotWritableError):
            other_user.call(make, tmp_path / "x", b"abc")


def open_writable(path: str) -> None:
    os.close(files.open_regular(path, writable=True))


class TestErrors:
    """Each error of the system is one of ours."""

    @pytest.mark.parametrize(
        ("number", "kind"),
        [
            (errno.ENOENT, errors.PathNotFoundError),
            (errno.ENOTDIR, errors.PathNotFoundError),
            (errno.EEXIST, errors.PathExistsError),
            (errno.ELOOP, errors.NotRegularFileError),
            (errno.EISDIR, errors.NotRegularFileError),
            (errno.ENXIO, errors.NotRegularFileError),
            (errno.ENOSPC, errors.NoSpaceError),
            (errno.EDQUOT, errors.NoSpaceError),
            (errno.EFBIG, errors.NoSpaceError),
            (errno.EACCES, errors.PathNotReadableError),
            (errno.EPERM, errors.PathNotReadableError),
            (errno.EMFILE, errors.PathError),
            (errno.EIO, errors.PathError),
        ],
    )
    def test_kind(self, number: int, kind: type[errors.PathError]) -> None:
        """The number decides the class; path and node are kept."""
        error = files.path_error(OSError(number, os.strerror(number)), "/x", node="w1")
        assert type(error) is kind
        assert (error.path, error.node) == ("/x", "w1")

    def test_too_many_open_files(self) -> None:
        """Too many open files is not the path's fault, and the hint says what to do."""
        error = files.path_error(OSError(errno.EMFILE, "Too many open files"), "/x")
        assert "ulimit -n" in str(error)


def test_reserve_and_free(tmp_path: Path) -> None:
    """A reservation sets the size and takes the space; more than there is fails."""
    with files.new_file(str(tmp_path / "x")) as file:
        files.reserve(file.fd, 1 << 20, file.path)
        status = os.fstat(file.fd)
        assert status.st_size == 1 << 20
        assert status.st_blocks * 512 >= 1 << 20
        files.reserve(file.fd, 0, file.path)
    with files.new_file(str(tmp_path / "x")) as file:
        with pytest.raises(errors.NoSpaceError) as caught:
            files.reserve(file.fd, 1 << 60, file.path)
        assert caught.value.needed_bytes == 1 << 60
        assert caught.value.free_bytes
    assert os.listdir(tmp_path) == []


def test_old_parts_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Who makes a file removes what makers that were killed have left in the directory."""
    monkeypatch.setattr(sweep, "_swept", set())
    stale = Path(sweep.part_name(str(tmp_path / "x")).replace(f"-{os.getpid()}-", "-4194304-"))
    stale.touch()
    make(tmp_path / "x", b"abc", replace=True)
    assert os.listdir(tmp_path) == ["x"]
