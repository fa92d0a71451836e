"""References: what travels in place of a tensor, and how it becomes one again."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmrpc
from mmrpc import MemoryMappedTensor, TensorRef, errors, ref
from mmrpc.core import reference, resolver
from mmrpc.core.layout import Layout
from mmrpc.core.location import (
    FileIdentity,
    FileLocation,
    Location,
    MemoryLocation,
    Mode,
    MountLocation,
)
from tests.needs import needs
from tests.peers import Peer

M = MemoryMappedTensor
IDENTITY = FileIdentity(1, 2, b"hxyz")
LOCATIONS: list[Location] = [
    FileLocation("0" * 16, "/x/ü", IDENTITY),
    MemoryLocation("0" * 16, 3, 4, 5, 6),
    MountLocation("data", "a/b", "0" * 16, IDENTITY, 99, "sha256:00"),
    MountLocation("data", "a/b", "0" * 16, IDENTITY, 99, "", "/mnt/data/a/b"),
]


@pytest.fixture
def x(tmp_path: Path) -> MemoryMappedTensor:
    return M.from_tensor(torch.arange(24.0).view(2, 3, 4), filename=tmp_path / "x")


class TestRef:
    """What has a reference."""

    def test_function_and_method(self, x: MemoryMappedTensor) -> None:
        """`ref` takes plain views too; the method is the same for the class."""
        assert mmrpc.ref(x) == x.ref()
        assert ref(x.view(-1)[3:]).open().tolist() == x.view(-1)[3:].tolist()
        assert reference.is_mapped(x.t() if x.dim() == 2 else x.view(-1))
        assert not reference.is_mapped(torch.ones(2))

    @pytest.mark.parametrize(
        "tensor",
        [torch.ones(2), torch.eye(2).to_sparse(), torch.ones(2, device="meta")],
        ids=["plain", "sparse", "meta"],
    )
    def test_others_have_none(self, tensor: torch.Tensor) -> None:
        """A tensor in plain memory has no reference, and the hint says how to have one."""
        with pytest.raises(errors.NotSharedError, match="from_tensor"):
            ref(tensor)

    def test_copies_have_none(self, x: MemoryMappedTensor) -> None:
        """What torch computed is not where its source was."""
        for tensor in (x + 1, x.clone(), x[[0]], x.view(-1).clone()):
            with pytest.raises(errors.NotSharedError):
                ref(tensor)

    def test_is_a_value(self, x: MemoryMappedTensor) -> None:
        """A reference compares, hashes and pickles as a value, and keeps nothing open."""
        one, two = x.ref(), x.ref()
        assert one == two
        assert len({one, two}) == 1
        assert pickle.loads(pickle.dumps(one)) == one
        assert one != x[0].ref()
        with pytest.raises(AttributeError):
            one.mode = Mode.READ
        os.unlink(x.filename)
        assert pickle.loads(pickle.dumps(one)) == one

    def test_size(self, tmp_path: Path) -> None:
        """What is pickled is as long for a small tensor as for a large one."""
        small = M.zeros(1, filename=tmp_path / "a")
        large = M.zeros(1 << 24, filename=tmp_path / "b")
        assert abs(len(pickle.dumps(small)) - len(pickle.dumps(large))) < 64
        assert len(pickle.dumps(large[5:])) < 400

    def test_modes(self, x: MemoryMappedTensor) -> None:
        """The mode travels; a receiver can choose another."""
        assert x.ref().mode is Mode.WRITE
        private = M.from_filename(x.filename, x.dtype, x.shape, mode="r")
        assert private.ref().mode is Mode.READ
        shared = private.ref().open("r+")
        received = pickle.loads(pickle.dumps(private))
        received[0] = 9
        assert x[0, 0, 0] == 0
        shared[0] = 9
        assert x[0, 0, 0] == 9
        with pytest.raises(ValueError, match='"r" or "r\\+", not "w"'.replace('"w"', "'w'")):
            x.ref().open("w")


def dump(tensor: torch.Tensor) -> bytes:
    return pickle.dumps(tensor)


class TestOpening:
    """Opening gives exactly the bytes that were meant, or an error."""

    def test_deleted(self, x: MemoryMappedTensor) -> None:
        """A deleted file is not found, though it is mapped here still; none is made."""
        data = dump(x)
        os.unlink(x.filename)
        with pytest.raises(errors.PathNotFoundError):
            pickle.loads(data)
        assert not os.path.exists(x.filename)

    def test_replaced(self, x: MemoryMappedTensor, peer: Peer) -> None:
        """A file of the same name, size and time is not the one that was meant."""
        reference = x.ref()
        status = os.stat(x.filename)
        os.unlink(x.filename)
        Path(x.filename).write_bytes(b"\1" * status.st_size)
        os.utime(x.filename, ns=(status.st_atime_ns, status.st_mtime_ns))
        for opener in (open_it, lambda r: peer.call(open_it, r)):
            with pytest.raises(errors.StaleReferenceError, match="send a new reference"):
                opener(reference)

    def test_renamed(self, x: MemoryMappedTensor) -> None:
        """A file that was renamed is not found; its new name has a reference of its own."""
        reference = x.ref()
        os.rename(x.filename, x.filename + "2")
        with pytest.raises(errors.PathNotFoundError):
            reference.open()

    def test_written_in_place(self, x: MemoryMappedTensor, peer: Peer) -> None:
        """Writes to a file do not make another file of it."""
        reference = x.ref()
        x.fill_(3)
        assert peer.call(open_it, reference) == 72

    def test_cut(self, x: MemoryMappedTensor, peer: Peer) -> None:
        """A file that was cut is too short, with both sizes, and is not grown."""
        reference = x.ref()
        os.truncate(x.filename, 50)
        with pytest.raises(errors.FileTooShortError) as caught:
            peer.call(open_it, reference)
        assert (caught.value.needed_bytes, caught.value.actual_bytes) == (96, 50)
        assert os.path.getsize(x.filename) == 50

    def test_other_host(self, x: MemoryMappedTensor) -> None:
        """A path of another host means nothing here, though there is such a file."""
        other = FileLocation("0" * 16, x.filename, x.ref().location.identity)
        with pytest.raises(errors.NotSharedError, match="mount of the cluster"):
            TensorRef(other, x.ref().layout, Mode.WRITE).open()

    def test_mount_without_a_cluster(self, x: MemoryMappedTensor) -> None:
        """A mount cannot be found by a process that knows none."""
        with pytest.raises(errors.ConfigError, match="knows no mounts"):
            TensorRef(LOCATIONS[2], x.ref().layout, Mode.WRITE).open()

    @needs("root")
    def test_read_only_receiver(self, shared_dir: str, other_user: Peer) -> None:
        """A receiver who may only read is told so, and can open it for reading."""
        x = M.ones(3, filename=f"{shared_dir}/x")
        os.chmod(x.filename, 0o644)
        with pytest.raises(errors.PathNotWritableError):
            other_user.call(open_it, x)
        assert other_user.call(open_for_reading, x.ref()) == 3
        os.chmod(x.filename, 0o600)
        with pytest.raises(errors.PathNotReadableError):
            other_user.call(open_for_reading, x.ref())


def open_it(reference: Any) -> float:
    tensor = reference.open() if isinstance(reference, TensorRef) else reference
    return float(tensor.sum())


def open_for_reading(reference: TensorRef) -> float:
    return float(reference.open("r").sum())


class TestPrivateWrites:
    """What is written to a map of mode "r" is in no file."""

    @pytest.fixture
    def private(self, tmp_path: Path) -> MemoryMappedTensor:
        M.zeros(4096, filename=tmp_path / "x")  # four pages
        return M.from_filename(tmp_path / "x", torch.float32, (4096,), mode="r")

    def test_refused(self, private: MemoryMappedTensor) -> None:
        """It never vanishes silently: sending it is refused, also through a view."""
        private[5] = 1
        for send in (ref, dump, lambda x: ref(x.view(-1)[:9]), lambda x: dump(x[5])):
            with pytest.raises(errors.NotSharedError, match=r"x\.clone\(\)"):
                send(private)

    def test_other_pages(self, private: MemoryMappedTensor) -> None:
        """A part that was not written to is sent as before."""
        private[5] = 1
        assert pickle.loads(dump(private[2048:])).sum() == 0
        with pytest.raises(errors.NotSharedError):
            ref(private[::2048])

    def test_reading_is_not_writing(self, private: MemoryMappedTensor) -> None:
        """What was only read is in the file."""
        assert private.sum() == 0
        assert pickle.loads(dump(private)).sum() == 0

    def test_receivers_writes(self, private: MemoryMappedTensor, peer: Peer) -> None:
        """A receiver of mode "r" keeps what it writes for itself."""
        peer.call(fill, private.ref())
        assert private.sum() == 0


def fill(reference: TensorRef) -> None:
    reference.open().fill_(1)


class TestPacked:
    """The flat form that pickles hold."""

    @pytest.mark.parametrize("location", LOCATIONS)
    @pytest.mark.parametrize("strides", [(2, 1), (1, 2)])
    @pytest.mark.parametrize("conj", [False, True])
    def test_round_trip(self, location: Location, strides: tuple[int, ...], conj: bool) -> None:
        """All of a reference survives."""
        layout = Layout(torch.complex64, (2, 2), strides, 8, conj, False)
        whole = TensorRef(location, layout, Mode.READ)
        assert reference.unpack(*reference.pack(whole)) == whole
        assert pickle.loads(pickle.dumps(whole)) == whole

    @pytest.mark.parametrize(
        "packed",
        [
            (("z", 1), "r", ("float32", 0, (2,), None)),
            (("f", 1), "r", ("float32", 0, (2,), None)),
            (reference._pack_location(LOCATIONS[0]), "w", ("float32", 0, (2,), None)),
            (reference._pack_location(LOCATIONS[0]), "r", ("float33", 0, (2,), None)),
            (reference._pack_location(LOCATIONS[0]), "r", ("float32", 0, (-2,), None)),
            (reference._pack_location(LOCATIONS[0]), "r", ("float32", 0, [2], None)),
            (reference._pack_location(LOCATIONS[0]), "r", ("float32",)),
            (reference._pack_location(LOCATIONS[0]), "r", ("float32", 0, (2**62, 2**62), None)),
        ],
    )
    def test_malformed(self, packed: tuple[Any, ...]) -> None:
        """What is no reference is a LayoutError, before anything is opened."""
        with pytest.raises(errors.LayoutError):
            reference.unpack(*packed)


class _Recording(resolver.HostResolver):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__("w9")
        self.asked: list[str] = []

    def locate(self, mapping: Any) -> Location:
        self.asked.append("locate")
        return super().locate(mapping)

    def attach(self, location: Location, mode: Mode, needed_bytes: int) -> Any:
        self.asked.append(f"attach {mode} {needed_bytes}")
        return super().attach(location, mode, needed_bytes)


@pytest.fixture
def recording() -> Iterator[_Recording]:
    mine = _Recording()
    before = resolver.set_resolver(mine)
    yield mine
    resolver.set_resolver(before)


def test_resolver_is_asked(x: MemoryMappedTensor, recording: _Recording) -> None:
    """All that is sent and opened goes through the resolver in use, which names the node."""
    pickle.loads(pickle.dumps(x[0]))
    assert recording.asked == ["locate", "attach r+ 48"]
    with pytest.raises(errors.NotSharedError) as caught:
        ref(torch.ones(2))
    assert caught.value.node == "w9"


def test_torch_save(x: MemoryMappedTensor) -> None:
    """torch.save writes a reference, which torch.load opens without weights_only=False."""
    buffer = io.BytesIO()
    torch.save({"x": x, "row": x[1], "plain": torch.ones(2)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    loaded["row"].fill_(-1)
    assert x[1].sum() == -12
    assert type(loaded["x"]) is M


def test_torch_save_of_data(x: MemoryMappedTensor) -> None:
    """A plain view or a clone is saved as data, which is whole without the file."""
    buffer = io.BytesIO()
    torch.save([x.clone(), x.view(-1)], buffer)
    os.unlink(x.filename)
    buffer.seek(0)
    clone, view = torch.load(buffer)
    assert torch.equal(clone, x)
    assert torch.equal(view, x.view(-1))


def test_torch_load_checks(x: MemoryMappedTensor, tmp_path: Path) -> None:
    """A saved reference is checked when it is loaded, as any other."""
    torch.save(x, tmp_path / "saved.pt")
    os.unlink(x.filename)
    with pytest.raises(errors.PathNotFoundError):
        torch.load(tmp_path / "saved.pt")


def test_storage_travels(x: MemoryMappedTensor) -> None:
    """A storage, as queues pickle it with each view, is a reference too."""
    storage = pickle.loads(pickle.dumps(x.view(-1).untyped_storage()))
    torch.empty(0).set_(storage).fill_(5)
    assert x[0, 0, 0] == 5
