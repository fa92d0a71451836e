"""Publishing: all or nothing, once, and nothing left behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor, load_tree, save_tree
from mmrpc.errors import (
    NotRegularFileError,
    OutsideMountsError,
    PathError,
    PathExistsError,
    PathNotFoundError,
    PathNotWritableError,
)
from mmrpc.paths import publishing as publishing_module
from mmrpc.paths.manifest import NAME
from mmrpc.paths.mounts import Mount
from mmrpc.paths.publishing import publishing, read_manifest
from mmrpc.paths.remote import Remote


@pytest.fixture
def mount(root: Path) -> Mount:
    return Mount("data", str(root), "write")


def fill(
    publication: contextlib.AbstractContextManager[str],
    files: dict[str, bytes],
    error: BaseException | None = None,
) -> None:
    """Publishes files, or fails when they are written."""
    with publication as directory:
        for name, content in files.items():
            Path(directory, name).write_bytes(content)
        if error is not None:
            raise error


def names(root: Path) -> set[str]:
    return set(os.listdir(root)) - {"file", "sub"}


def test_a_tree_of_tensors(mount: Mount, root: Path) -> None:
    """What other code writes into the directory is published whole, with sizes and digests."""
    with publishing(mount, "weights/v1") as directory:
        save_tree(directory + "/tree", {"a": torch.arange(3.0), "b": {"c": torch.ones(2, 2)}})
        MemoryMappedTensor.from_tensor(torch.zeros(5), filename=directory + "/x")
        assert os.listdir(root / "weights") == [os.path.basename(directory)]
    assert os.listdir(root / "weights") == ["v1"]
    loaded = load_tree(root / "weights" / "v1" / "tree", "r")
    assert torch.equal(loaded["b"]["c"], torch.ones(2, 2))
    entry = read_manifest(mount, "weights/v1").files["x"]
    assert entry.size_bytes == 20
    assert entry.digest == "sha256:" + hashlib.sha256(bytes(20)).hexdigest()


def test_what_is_published_is_read_only(mount: Mount, root: Path) -> None:
    """Nobody may write to the files afterwards, the manifest included."""
    with publishing(mount, "v1") as directory:
        Path(directory, "x").write_bytes(b"x")
    for name in ("x", NAME):
        assert not (root / "v1" / name).stat().st_mode & 0o222


def test_an_error_publishes_nothing(mount: Mount, root: Path) -> None:
    """Exceptions and interruptions leave neither the directory nor its scratch."""
    for error in (RuntimeError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fill(publishing(mount, "v1"), {"x": b"x"}, error)
    assert names(root) == set()


def test_a_name_is_published_once(mount: Mount, root: Path) -> None:
    """A second publisher gets an error, whether it comes later or meanwhile."""
    slow = publishing(mount, "v1")
    Path(slow.__enter__(), "x").write_bytes(b"second")
    fill(publishing(mount, "v1"), {"x": b"first"})
    with pytest.raises(PathExistsError):
        slow.__exit__(None, None, None)
    with pytest.raises(PathExistsError, match="never changed"), publishing(mount, "v1"):
        pytest.fail("the block ran")
    assert (root / "v1" / "x").read_bytes() == b"first"
    assert names(root) == {"v1"}


def test_without_renameat2_it_is_the_same(
    mount: Mount, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems that cannot rename exclusively do not replace what is published either."""

    def no(source: str, target: str) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(publishing_module.libc, "rename_noreplace", no)
    test_a_name_is_published_once(mount, root)


def test_a_rename_that_was_done_and_reported_as_failed(
    mount: Mount, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a request whose answer was lost: what counts is where the directory is."""
    real = publishing_module.libc.rename_noreplace

    def lossy(source: str, target: str) -> None:
        real(source, target)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(publishing_module.libc, "rename_noreplace", lossy)
    with publishing(mount, "v1") as directory:
        Path(directory, "x").write_bytes(b"x")
    assert (root / "v1" / "x").read_bytes() == b"x"


def test_many_publishers_of_one_name(mount: Mount, root: Path) -> None:
    """Exactly one wins, and what is there is all its own."""
    barrier = threading.Barrier(6)
    outcomes: list[str] = []

    def run(index: int) -> None:
        try:
            with publishing(mount, "v1") as directory:
                for name in ("x", "y"):
                    Path(directory, name).write_bytes(str(index).encode())
                barrier.wait(30)
            outcomes.append("published")
        except PathExistsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=run, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["published"] + 5 * ["refused"]
    assert (root / "v1" / "x").read_bytes() == (root / "v1" / "y").read_bytes()
    assert names(root) == {"v1"}


def test_a_killed_publisher_is_swept_by_the_next(mount: Mount, root: Path) -> None:
    """SIGKILL in the middle leaves a scratch directory, until somebody publishes beside it."""
    code = (
        "import sys, time\n"
        "from mmrpc.paths.mounts import Mount\n"
        "from mmrpc.paths.publishing import publishing\n"
        f"with publishing(Mount('data', {str(root)!r}, 'write'), 'v1') as directory:\n"
        "    open(directory + '/x', 'w').close()\n"
        "    print(flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(names(root)) == 1
    with publishing(mount, "v2") as directory:
        Path(directory, "x").write_bytes(b"x")
    assert names(root) == {"v2"}


def test_only_files_are_published(mount: Mount, root: Path, tmp_path: Path) -> None:
    """A link or FIFO in the directory is refused: others could not read it."""
    with pytest.raises(NotRegularFileError), publishing(mount, "v1") as directory:
        Path(directory, "link").symlink_to(tmp_path / "secret")
    assert names(root) == set()


def test_nothing_is_published_outside(mount: Mount, root: Path) -> None:
    """The path is checked like that of a reference."""
    for relative in ("../v1", "/v1", "", "a::b"):
        with pytest.raises(OutsideMountsError), publishing(mount, relative):
            pytest.fail("the block ran")


def test_where_nothing_may_be_written(root: Path, tmp_path: Path) -> None:
    """A mount that is no directory is a typed error before the block runs."""
    mount = Mount("data", str(root / "file"), "write")
    with pytest.raises(PathError), publishing(mount, "v1", node="a"):
        pytest.fail("the block ran")


def test_incomplete_things_are_not_found(mount: Mount, root: Path) -> None:
    """A directory without its manifest is not there yet; a broken manifest is an error."""
    (root / "v1").mkdir()
    with pytest.raises(PathNotFoundError, match="nothing complete"):
        read_manifest(mount, "v1", node="a")
    (root / "v1" / NAME).write_text("{")
    with pytest.raises(PathError, match="malformed"):
        read_manifest(mount, "v1", node="a")


class TestRemote:
    """The same on a store without directories or renames."""

    @pytest.fixture
    def remote(self) -> Remote:
        fsspec = pytest.importorskip("fsspec")
        fs = fsspec.filesystem("memory")
        fs.store.clear()
        return Remote(Mount("data", "memory://bucket", "write"), node="a")

    def objects(self, remote: Remote) -> list[str]:
        return sorted(remote._fs.find("/bucket"))

    def test_the_manifest_comes_last(self, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
        """When the manifest appears, everything else is there."""
        seen: list[list[str]] = []
        real = Remote.create

        def create(self: Remote, relative: str, content: bytes) -> None:
            seen.append(sorted(remote._fs.find("/bucket")))
            real(self, relative, content)

        monkeypatch.setattr(Remote, "create", create)
        with publishing(remote.mount, "v1", remote=remote) as directory:
            os.mkdir(f"{directory}/sub")
            for name in ("x", "sub/y"):
                Path(directory, name).write_bytes(name.encode())
        assert seen == [["/bucket/v1/sub/y", "/bucket/v1/x"]]
        assert set(read_manifest(remote.mount, "v1", remote=remote).files) == {"x", "sub/y"}
        assert not os.path.exists(directory)

    def test_a_failed_upload_is_taken_back(
        self, remote: Remote, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If a file does not arrive, those before it go again."""
        real = Remote.put

        def put(self: Remote, source: str, relative: str) -> None:
            if relative.endswith("y"):
                raise PathNotWritableError("the disk of the server is full", path=relative)
            real(self, source, relative)

        monkeypatch.setattr(Remote, "put", put)
        with pytest.raises(PathNotWritableError):
            fill(publishing(remote.mount, "v1", remote=remote), {"x": b"1", "y": b"2"})
        assert self.objects(remote) == []

    def test_a_file_that_arrives_short_is_not_published(
        self, remote: Remote, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sizes are compared before the manifest says that all is there."""
        monkeypatch.setattr(
            Remote, "put", lambda self, s, r: self._fs.pipe_file(self._path(r), b"c")
        )
        with pytest.raises(PathError, match="1 bytes arrived of 7"):
            fill(publishing(remote.mount, "v1", remote=remote), {"x": b"content"})
        assert self.objects(remote) == []

    def test_the_second_publisher_is_refused(self, remote: Remote) -> None:
        """What was published first stays, also if both were at work at once."""
        slow = publishing(remote.mount, "v1", remote=remote)
        Path(slow.__enter__(), "y").write_bytes(b"second")
        fill(publishing(remote.mount, "v1", remote=remote), {"x": b"first"})
        with pytest.raises(PathExistsError):
            slow.__exit__(None, None, None)
        assert set(read_manifest(remote.mount, "v1", remote=remote).files) == {"x"}
        with (
            pytest.raises(PathExistsError),
            publishing(remote.mount, "v1", remote=remote),
        ):
            pytest.fail("the block ran")
