"""Copies of existing tensors, whatever they look like."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrpc import MemoryMappedTensor, errors
from mmrpc.core import creation, files, sweep
from tests.peers import Peer
from tests.unit.core.tensors import ORDINARY, bits, random_tensor, shapes, steps, until

M = MemoryMappedTensor
MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


class TestSources:
    """from_tensor gives the values of any strided source."""

    @given(data=st.data())
    def test_any_view(self, data: st.DataObject) -> None:
        """A view of whatever strides is copied in row-major order."""
        source = random_tensor(data.draw(st.sampled_from(ORDINARY)), data.draw(shapes))
        for _ in range(data.draw(st.integers(0, 3))):
            method, args = data.draw(steps(tuple(source.shape)))
            source = getattr(source, method)(*args)
        x = M.from_tensor(source)
        assert bits(x) == bits(source)
        assert x.is_contiguous()

    def test_lazy(self, tmp_path: Path) -> None:
        """Conjugates and negatives are written as the values that they stand for."""
        source = torch.randn(3, 4, dtype=torch.complex64)
        for view in (source.conj(), source.conj().imag, source.mH, torch._neg_view(source.real)):
            x = M.from_tensor(view, filename=tmp_path / "x", existsok=True)
            assert x.tolist() == view.tolist()
            assert M.from_filename(tmp_path / "x", x.dtype, x.shape).tolist() == view.tolist()

    def test_channels_last(self) -> None:
        """A memory format is not kept; the values are."""
        source = torch.arange(48.0).view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        x = M.from_tensor(source)
        assert torch.equal(x, source)
        assert x.is_contiguous()

    def test_large_rearranged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A source that must be rearranged is so piece by piece, and none is lost."""
        monkeypatch.setattr(creation, "_PIECE_BYTES", 1000)
        for source in (
            torch.arange(4000).view(40, 100).t(),
            torch.arange(5000).view(5, 1000)[:, ::2],
            torch.tensor(3).expand(2, 2000),
            torch.randn(20, 30, dtype=torch.complex64).conj(),
        ):
            assert torch.equal(M.from_tensor(source), source)

    def test_wrong_kinds(self, tmp_path: Path) -> None:
        """What is no tensor, or has no plain bytes, is refused with a hint, and makes no file."""
        cases: list[tuple[object, type[Exception], str]] = [
            ([1, 2], TypeError, "as_tensor"),
            (3, TypeError, "as_tensor"),
            (np.ones(3), TypeError, "as_tensor"),
            (torch.ones(2, requires_grad=True), RuntimeError, "detach"),
            (torch.eye(2).to_sparse(), NotImplementedError, "sparse_coo"),
            (torch.ones(2, device="meta"), NotImplementedError, "meta"),
        ]
        for source, kind, text in cases:
            with pytest.raises(kind, match=text):
                M.from_tensor(source, filename=tmp_path / "x")
        assert os.listdir(tmp_path) == []

    def test_quantized(self) -> None:
        """A quantized tensor's bytes do not say its values."""
        with pytest.warns(), pytest.raises(errors.UnsupportedTensorError, match="quantized"):
            M.from_tensor(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))

    def test_parameter(self) -> None:
        """A parameter without gradient is a tensor like another."""
        assert M.from_tensor(torch.nn.Parameter(torch.ones(2), requires_grad=False)).sum() == 2

    def test_broadcast(self, tmp_path: Path) -> None:
        """shape= gives the values of expand()."""
        x = M.from_tensor(torch.arange(3), shape=(2, 3), filename=tmp_path / "x")
        assert x.tolist() == [[0, 1, 2]] * 2
        with pytest.raises(errors.LayoutError, match="cannot be broadcast to"):
            M.from_tensor(torch.arange(3), shape=(2, 4))

    def test_without_data(self, tmp_path: Path) -> None:
        """copy_data=False gives shape and dtype only."""
        x = M.from_tensor(
            torch.ones(3, dtype=torch.int16), copy_data=False, filename=tmp_path / "x"
        )
        assert (x.tolist(), x.dtype) == ([0, 0, 0], torch.int16)


class TestMappedSources:
    """from_tensor of what is mapped already."""

    def test_returned_as_it_is(self, tmp_path: Path) -> None:
        """Data that is where it is asked to be is not copied."""
        memory, file = M.ones(3), M.ones(3, filename=tmp_path / "x")
        assert M.from_tensor(memory) is memory
        assert M.from_tensor(file, filename=file.filename) is file
        assert M.from_tensor(file, filename=tmp_path / "." / "x", existsok=True) is file

    def test_copied_to_memory(self, tmp_path: Path) -> None:
        """A tensor in a file is copied to memory, when no file is asked for."""
        file = M.ones(3, filename=tmp_path / "x")
        copy = M.from_tensor(file)
        copy.zero_()
        assert file.sum() == 3

    def test_not_twice_on_disk_by_mistake(self, tmp_path: Path) -> None:
        """Another file needs copy_existing=True, which the message names."""
        file = M.ones(3, filename=tmp_path / "x")
        with pytest.raises(RuntimeError, match="copy_existing"):
            M.from_tensor(file, filename=tmp_path / "y")
        assert os.listdir(tmp_path) == ["x"]
        assert M.from_tensor(file, filename=tmp_path / "y", copy_existing=True).sum() == 3
        assert M.from_tensor(M.ones(3), filename=tmp_path / "z").sum() == 3

    def test_private_map_is_written_back(self, tmp_path: Path) -> None:
        """What was written to a copy-on-write map is saved by copying over its own file."""
        M.zeros(3, filename=tmp_path / "x")
        private = M.from_filename(tmp_path / "x", torch.float32, (3,), mode="r")
        private.fill_(2)
        with pytest.raises(errors.PathExistsError):
            M.from_tensor(private, filename=tmp_path / "x")
        saved = M.from_tensor(private, filename=tmp_path / "x", existsok=True)
        assert saved is not private
        assert M.from_filename(tmp_path / "x", torch.float32, (3,)).sum() == 6

    def test_part_of_itself(self, tmp_path: Path) -> None:
        """A view of a file, reversed in place of the whole, has the values it had."""
        whole = M.from_tensor(torch.arange(6.0).view(2, 3), filename=tmp_path / "x")
        turned = M.from_tensor(whole.t().flip(0), filename=tmp_path / "x", existsok=True)
        assert turned.tolist() == [[2, 5], [1, 4], [0, 3]]
        assert whole.tolist() == [[0, 1, 2], [3, 4, 5]]

    def test_view_over_its_own_file(self, tmp_path: Path) -> None:
        """A plain view that replaces the file that it is in is not garbled by what is written."""
        whole = M.from_tensor(torch.arange(8.0), filename=tmp_path / "x")
        assert M.from_tensor(whole[4:], filename=tmp_path / "x").tolist() == [4, 5, 6, 7]
        half = M.from_tensor(whole.detach()[4:], filename=tmp_path / "x", existsok=True)
        assert half.tolist() == [4, 5, 6, 7]
        assert (tmp_path / "x").stat().st_size == 16
        assert whole.tolist() == list(range(8))


def create(path: str, value: int, count: int = 4096) -> str:
    try:
        M.full(count, fill_value=value, dtype=torch.int32, filename=path)
    except errors.PathExistsError:
        return "taken"
    return "made"


def create_all(directory: str, value: int) -> list[str]:
    """What came of making many names, each of which others make too."""
    return [create(f"{directory}/{number}", value) for number in range(100)]


class TestRaces:
    """Of all that make one name, one wins."""

    def test_processes(self, tmp_path: Path) -> None:
        """Exactly one process makes each file, and each file is of one maker."""
        with Peer() as a, Peer() as b, Peer() as c:
            peers = [a, b, c]
            for value, peer in enumerate(peers):
                peer.start(create_all, str(tmp_path), value)
            outcomes = [peer.result() for peer in peers]
        for number, found in enumerate(zip(*outcomes, strict=True)):
            assert sorted(found) == ["made", "taken", "taken"]
            x = M.from_filename(tmp_path / str(number), torch.int32, (4096,))
            assert x.unique().tolist() == [found.index("made")]

    def test_threads(self, tmp_path: Path) -> None:
        """Exactly one thread makes each file."""
        outcomes: list[list[str]] = []
        start = threading.Barrier(4)

        def run(value: int) -> None:
            start.wait()
            outcomes.append(create_all(str(tmp_path), value))

        threads = [threading.Thread(target=run, args=(value,)) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for found in zip(*outcomes, strict=True):
            assert sorted(found) == ["made", "taken", "taken", "taken"]

    def test_replacing(self, tmp_path: Path) -> None:
        """Who reads while others replace sees a whole file of one maker each time."""
        path = f"{tmp_path}/x"
        create(path, 0)
        with Peer() as a, Peer() as b:
            for value, peer in ((1, a), (2, b)):
                peer.start(replace_often, path, value)
            for _ in range(300):
                x = M.from_filename(path, torch.int32, (4096,))
                assert len(x.unique()) == 1
            assert (a.result(), b.result()) == ("done", "done")
        assert os.listdir(tmp_path) == ["x"]


def replace_often(path: str, value: int) -> str:
    for _ in range(100):
        M.full(4096, fill_value=value, dtype=torch.int32, filename=path, existsok=True)
    return "done"


def stop_within(path: str, where: str, replace: bool, without_tmpfile: bool) -> None:
    """Makes a file, and stops for good at a point of it."""

    def stop(*_: object, **__: object) -> None:
        Path(f"{path}.stopped").touch()
        signal.pause()

    if without_tmpfile:
        files._NO_TMPFILE = {*files._NO_TMPFILE, 0}
        real_open = os.open

        def no_tmpfile(name: str, flags: int, *args: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, "not supported")
            return real_open(name, flags, *args)

        os.open = no_tmpfile
    if where == "writing":
        real_pwrite = os.pwrite

        def write_some(fd: int, data: memoryview, offset: int) -> int:
            real_pwrite(fd, data[: len(data) // 2], offset)
            stop()
            return 0

        os.pwrite = write_some
    elif where == "publishing":
        os.link = os.rename = stop
    else:
        os.rename = stop
    M.ones(1000, filename=path, existsok=replace)


class TestKilled:
    """A maker that is killed leaves nothing under the name, and nothing that stays."""

    @pytest.mark.parametrize("without_tmpfile", [False, True])
    @pytest.mark.parametrize(
        ("where", "replace"),
        [
            *(("writing", False), ("writing", True)),
            *(("publishing", False), ("publishing", True), ("renaming", True)),
        ],
    )
    def test_killed(self, where: str, replace: bool, without_tmpfile: bool, tmp_path: Path) -> None:
        """The name is as before; a temporary file, if there is one, goes with the next sweep."""
        path = f"{tmp_path}/x"
        if replace:
            Path(path).write_bytes(b"old")
        with Peer() as peer:
            peer.start(stop_within, path, where, replace, without_tmpfile)
            until(lambda: os.path.exists(f"{path}.stopped"))
            peer.kill()
        os.unlink(f"{path}.stopped")
        if replace:
            assert Path(path).read_bytes() == b"old"
        left = sorted(set(os.listdir(tmp_path)) - {"x"})
        assert sweep.sweep(str(tmp_path)) == left
        assert os.listdir(tmp_path) == (["x"] if replace else [])
        assert M.ones(5, filename=path, existsok=replace).sum() == 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception while the data is written leaves nothing, and the retry works."""

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        with pytest.raises(error):
            M.ones(5, filename=tmp_path / "x")
    assert os.listdir(tmp_path) == []
    assert M.ones(5, filename=tmp_path / "x").sum() == 5


def test_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """durable= puts the file and its name on the device, in that order."""
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append("directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        synced.append("named" if (tmp_path / "x").exists() else "nameless")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    M.ones(5, filename=tmp_path / "x", durable=True)
    assert synced == ["file", "nameless", "directory", "named"]
    synced.clear()
    M.ones(5, filename=tmp_path / "y")
    M.from_tensor(torch.ones(5), filename=tmp_path / "z")
    assert synced == []
    M.from_tensor(torch.ones(5), filename=tmp_path / "z", existsok=True, durable=True)
    assert synced[::2] == ["file", "directory"]


@pytest.mark.parametrize(
    ("given_path", "expected"),
    [("a", "{cwd}/a"), ("./a/./b", "{cwd}/a/b"), ("/x//y/", "/x/y"), ("/x/../y", "/x/../y")],
)
def test_absolute_path(given_path: str, expected: str) -> None:
    """A path is made absolute; `..` stays, since what is before it may be a link."""
    assert creation.absolute_path(given_path) == expected.format(cwd=os.getcwd())


def test_no_path() -> None:
    """What is no path is a TypeError, and an empty one is not found."""
    with pytest.raises(TypeError):
        M.zeros(2, filename=3)
    with pytest.raises(errors.PathNotFoundError, match="empty"):
        M.zeros(2, filename="")
    assert creation.absolute_path(os.fsencode("/tmp/x").decode()) == "/tmp/x"
