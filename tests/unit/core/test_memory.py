"""Anonymous memory: few descriptors, nothing left behind, nobody else's bytes."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Named
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, rule

from mmrpc import MemoryMappedTensor, TensorRef, errors
from mmrpc.core import lease, memory
from mmrpc.core.location import MemoryLocation
from mmrpc.core.system import host
from tests.needs import needs
from tests.peers import Peer
from tests.unit.core.tensors import until

MIB = 1 << 20
MANY = 10_000


def filled(nbytes: int, value: int) -> MemoryMappedTensor:
    return MemoryMappedTensor.full(nbytes, fill_value=value, dtype=torch.uint8)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


_held: list[MemoryMappedTensor] = []


def hold(count: int, nbytes: int) -> tuple[list[TensorRef], int]:
    """Makes tensors and keeps them; gives references to them, and the descriptors they took."""
    before = descriptors()
    _held.extend(filled(nbytes, n % 251) for n in range(count))
    return [x.ref() for x in _held[-count:]], descriptors() - before


def drop() -> None:
    _held.clear()
    lease.end_all()
    gc.collect()


def read(reference: TensorRef) -> int:
    return int(reference.open()[-1])


def open_many(references: list[TensorRef]) -> tuple[list[int], int]:
    before = descriptors()
    tensors = [reference.open() for reference in references]
    return [int(x[0]) for x in tensors], descriptors() - before


def keep(reference: TensorRef) -> None:
    _held.append(reference.open())


def kept() -> list[int]:
    return [int(x[0]) for x in _held]


class TestDescriptors:
    """The number of tensors is not limited by the number of open files."""

    @pytest.mark.parametrize("nbytes", [16, 5000])
    def test_many_small(self, nbytes: int) -> None:
        """Ten thousand tensors, here and at a receiver, need a few descriptors."""
        with Peer(nofile=1024) as owner, Peer(nofile=1024) as receiver:
            references, opened = owner.call(hold, MANY, nbytes)
            assert opened < 10
            values, opened = receiver.call(open_many, references)
            assert values == [n % 251 for n in range(MANY)]
            assert opened <= 1  # by which it tells the owner

    def test_many_large(self) -> None:
        """Large tensors have a file each only while they are few for their size."""
        with Peer(nofile=1024) as owner:
            _, opened = owner.call(hold, 200, MIB)
            assert opened < 10
            _, opened = owner.call(hold, 20, 9 * MIB)
            assert opened <= 21
            owner.call(drop)
            assert owner.call(descriptors) < 20


class TestLifetime:
    """Memory lives as long as somebody maps it, and is opened while its owner lives."""

    def test_killed_owner(self, peer: Peer) -> None:
        """A receiver keeps what it maps when its owner is killed; nobody can open it any more."""
        with Peer() as owner:
            (first, second), _ = owner.call(hold, 2, 9 * MIB)
            peer.call(keep, first)
            owner.kill()
        assert peer.call(kept) == [0]
        peer.call(drop)
        with pytest.raises(errors.StaleReferenceError, match="has ended") as caught:
            peer.call(read, second)
        assert "use a file" in caught.value.hint

    def test_killed_owner_frees(self) -> None:
        """The memory of a killed process goes back to the system."""
        with Peer() as owner:
            before = shared_bytes()
            owner.call(hold, 4, 128 * MIB)
            assert shared_bytes() - before > 300 * MIB
            owner.kill()
        until(lambda: shared_bytes() - before < 200 * MIB)

    def test_dropped(self) -> None:
        """What is dropped and was never sent goes back at once, from arenas too."""
        arena = filled(5000, 1)
        inode = arena.untyped_storage()._mapping.arena.inode
        before = used_bytes(inode)
        small = [filled(4 * MIB, 1) for _ in range(3)]
        assert {x.untyped_storage()._mapping.arena.inode for x in small} == {inode}
        assert used_bytes(inode) - before >= 12 * MIB
        del small
        assert used_bytes(inode) - before < MIB

    def test_freed_memory_is_stale(self, peer: Peer) -> None:
        """A reference to what its living owner has freed is stale."""
        with Peer() as owner:
            (reference,), _ = owner.call(hold, 1, 9 * MIB)
            owner.call(drop)
            with pytest.raises(errors.StaleReferenceError, match="freed"):
                peer.call(read, reference)

    def test_reused_descriptor_is_stale(self, peer: Peer) -> None:
        """A descriptor that is another memory file by now is not opened."""
        with Peer() as owner:
            (old,), _ = owner.call(hold, 1, 9 * MIB)
            owner.call(drop)
            (new,), _ = owner.call(hold, 1, 9 * MIB)
            if new.location.fd == old.location.fd:
                with pytest.raises(errors.StaleReferenceError, match="freed"):
                    peer.call(read, old)
            assert peer.call(read, new) == 0


def shared_bytes() -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["Shmem"].split()[0]) * 1024


def used_bytes(inode: int) -> int:
    for fd in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if status.st_ino == inode and lease.is_memory(os.readlink(f"/proc/self/fd/{fd}")):
            return status.st_blocks * 512
    raise AssertionError("no such memory file")


def location(**changes: object) -> TensorRef:
    reference = filled(8, 3).ref()
    fields = {name: getattr(reference.location, name) for name in MemoryLocation.__slots__}
    return TensorRef(MemoryLocation(**{**fields, **changes}), reference.layout, reference.mode)


class TestRefused:
    """A location that is not ours, or not there, is a typed error."""

    def test_other_host(self) -> None:
        """Another host's memory cannot be reached, and the error says what can be."""
        with pytest.raises(errors.NotSharedError, match=r"another host.*filename"):
            location(host="0" * 16).open()

    def test_other_start_time(self, peer: Peer) -> None:
        """A process that has the PID of the owner but is not the owner is not asked."""
        with pytest.raises(errors.StaleReferenceError, match="has ended"):
            peer.call(read, location(started=1))

    def test_descriptor_of_something_else(self, peer: Peer, tmp_path: Path) -> None:
        """A descriptor that is no memory file of ours is never mapped."""
        with open(tmp_path / "x", "wb+") as file:
            file.write(b"abc" * 99)
            file.flush()
            with pytest.raises(errors.StaleReferenceError, match="freed"):
                peer.call(read, location(fd=file.fileno(), inode=os.fstat(file.fileno()).st_ino))
        with pytest.raises(errors.StaleReferenceError, match="freed"):
            peer.call(read, location(fd=999))

    @needs("root")
    def test_other_user(self, other_user: Peer) -> None:
        """An ordinary user cannot open the memory of another."""
        with pytest.raises(errors.PathNotReadableError, match=r"another user.*Share a file"):
            other_user.call(read, filled(8, 3).ref())

    def test_beyond_the_end(self, peer: Peer) -> None:
        """A layout that does not fit the memory is refused before anything is mapped from it."""
        x = filled(8, 3)
        reference = x.ref()
        long = TensorRef(reference.location, reference.layout.moved(1 << 40), reference.mode)
        for opener in (read, lambda r: peer.call(read, r)):
            with pytest.raises(errors.FileTooShortError):
                opener(long)

    def test_nobody_can_shrink_it(self) -> None:
        """The memory is sealed: who opens it cannot cut it under the others."""
        fd = filled(8, 3).ref().location.fd
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)


class TestSpace:
    """Space is checked when a tensor is made."""

    @pytest.mark.parametrize("make", ["zeros", "ones"])
    def test_too_much(self, make: str) -> None:
        """More memory than there is cannot be had, and nothing is left behind."""
        gc.collect()  # what failed tests hold on to
        before, live = descriptors(), memory._live_bytes
        with pytest.raises(errors.NoSpaceError, match=r"available.*filename") as caught:
            getattr(MemoryMappedTensor, make)(1 << 44, dtype=torch.uint8)
        assert caught.value.needed_bytes == 1 << 44
        assert isinstance(caught.value, OSError)
        gc.collect()
        assert (descriptors(), memory._live_bytes) == (before, live)

    def test_out_of_descriptors(self) -> None:
        """A process that may not open a file is told so."""
        with Peer(nofile=64) as peer, pytest.raises(errors.PathError, match="ulimit -n"):
            peer.call(exhaust_descriptors)


def exhaust_descriptors() -> None:
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        filled(9 * MIB, 1)
    finally:
        for fd in held:
            os.close(fd)


def fork(reference_of_parent: bool) -> list[int]:
    """What a forked child and its parent see of each other's writes."""
    x = filled(5000, 1)
    before = pickle.dumps(x) if reference_of_parent else b""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            mine = filled(5000, 2)  # in a place that the parent does not use
            x[0] = 9
            opened = pickle.loads(before or pickle.dumps(x))
            opened[1] = 8
            os.write(write_end, bytes([int(mine[0]), int(x[1]), int(mine[-1])]))
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    theirs = filled(5000, 3)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seen = list(os.read(read_end, 10))
    os.close(read_end)
    os.close(write_end)
    return [code, *seen, int(x[0]), int(x[1]), int(theirs[0])]


@pytest.mark.parametrize("reference_of_parent", [False, True])
def test_fork(reference_of_parent: bool, peer: Peer) -> None:
    """Parent and child share what was there, and what either makes afterwards is its own."""
    assert peer.call(fork, reference_of_parent) == [0, 2, 8, 2, 9, 8, 3]


def child_outlives_parent() -> tuple[TensorRef, int]:
    """A reference that a forked child makes of memory that its parent made."""
    x = filled(9 * MIB, 5)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(write_end, pickle.dumps(x.ref()))
        os.close(write_end)
        os.read(os.open("/dev/zero", os.O_RDONLY), 1)
        while True:
            signal_wait()
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        return pickle.loads(pipe.read(4096)), pid


def signal_wait() -> None:
    import signal

    signal.pause()


def test_child_keeps_memory_of_killed_parent(peer: Peer) -> None:
    """Memory that a child inherited can be opened through the child when the parent is killed."""
    with Peer() as parent:
        reference, child = parent.call(child_outlives_parent)
        parent.kill()
    try:
        assert reference.location.pid == child
        assert peer.call(read, reference) == 5
    finally:
        os.kill(child, 9)
    until(lambda: not host.is_alive(child, reference.location.started))
    with pytest.raises(errors.StaleReferenceError):
        reference.open()


def test_location_is_this_process() -> None:
    """A reference names this process, and opens the memory in place here."""
    x = filled(8, 3)
    where = x.ref().location
    assert (where.pid, where.started) == (os.getpid(), host.own_start_time())
    assert x.ref().open().data_ptr() == x.data_ptr()


class Allocations(RuleBasedStateMachine):
    """Makes, sends, reopens and drops tensors, and looks that each keeps its own bytes."""

    tensors: Named[tuple[MemoryMappedTensor, int]] = Named("tensors")
    references: Named[tuple[TensorRef, int]] = Named("references")

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[MemoryMappedTensor, int]] = {}

    def _hold(self, x: MemoryMappedTensor, value: int) -> tuple[MemoryMappedTensor, int]:
        self.live[id(x)] = x, value
        return x, value

    @rule(
        target=tensors,
        nbytes=st.sampled_from([0, 1, 63, 64, 65, 4095, 4096, 4097, 50_000, MIB, 9 * MIB]),
        value=st.integers(1, 255),
    )
    def make(self, nbytes: int, value: int) -> tuple[MemoryMappedTensor, int]:
        """Fresh zeros are zeros, whoever had the memory before."""
        x = MemoryMappedTensor.zeros(nbytes, dtype=torch.uint8)
        assert not x.any()
        x.fill_(value)
        return self._hold(x, value)

    @rule(target=tensors, value=st.integers(1, 255), nbytes=st.integers(0, 9000))
    def copy(self, nbytes: int, value: int) -> tuple[MemoryMappedTensor, int]:
        """A copy has the source's values."""
        return self._hold(filled(nbytes, value), value)

    @rule(target=references, tensor=tensors)
    def export(self, tensor: tuple[MemoryMappedTensor, int]) -> tuple[TensorRef, int]:
        """A reference pins the bytes that it means."""
        return tensor[0].ref(), tensor[1]

    @rule(target=tensors, reference=references)
    def reopen(self, reference: tuple[TensorRef, int]) -> tuple[MemoryMappedTensor, int]:
        """A reference gives the bytes that were meant, or is stale; never others."""
        try:
            x = reference[0].open()
        except errors.StaleReferenceError:
            x = filled(0, 0)
        assert (x == reference[1]).all()
        return self._hold(x, reference[1])

    @rule(tensor=consumes(tensors))
    def drop(self, tensor: tuple[MemoryMappedTensor, int]) -> None:
        """Dropping one leaves the others alone."""
        self.live.pop(id(tensor[0]), None)

    @rule()
    def end_leases(self) -> None:
        """Memory that waited for a receiver is let go of."""
        lease.end_all()

    @invariant()
    def everyone_has_their_own(self) -> None:
        """All live tensors hold what was written to them."""
        for x, value in self.live.values():
            assert (x == value).all()


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
