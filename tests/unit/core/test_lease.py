"""Exported memory waits for its receivers, and for them only."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator

import pytest
import torch

from mmrpc import MemoryMappedTensor, TensorRef
from mmrpc.core import lease
from mmrpc.errors import StaleReferenceError
from tests.peers import Peer
from tests.unit.core.tensors import until

BIG = 9 << 20  # has a memory file of its own


@pytest.fixture
def own_peer() -> Iterator[Peer]:
    """A process that has none of our memory mapped."""
    with Peer() as peer:
        yield peer


def reference_to_dropped(nbytes: int = 3) -> TensorRef:
    return MemoryMappedTensor.full(nbytes, fill_value=7, dtype=torch.uint8).ref()


def value(reference: TensorRef) -> float:
    return reference.open()[0].item()


def memory_files() -> set[str]:
    return {name for name in links("/proc/self/fd") if lease.is_memory(name)}


def links(directory: str) -> Iterator[str]:
    for name in os.listdir(directory):
        try:
            yield os.readlink(f"{directory}/{name}")
        except FileNotFoundError:
            continue


@pytest.mark.parametrize("nbytes", [3, BIG])
def test_reference_outlives_the_tensor(nbytes: int, own_peer: Peer) -> None:
    """What was made for sending only, as a result is, can be opened when it arrives."""
    reference = reference_to_dropped(nbytes)
    gc.collect()
    assert own_peer.call(value, reference) == 7


def test_memory_goes_when_it_was_received(own_peer: Peer) -> None:
    """Once it was opened as often as references were made, the owner lets go of it."""
    before = memory_files()
    reference = reference_to_dropped(BIG)
    (file,) = memory_files() - before
    assert own_peer.call(value, reference) == 7
    until(lambda: file not in memory_files())
    with pytest.raises(StaleReferenceError, match="freed"):
        own_peer.call(value, reference)


def test_memory_waits_for_every_receiver(own_peer: Peer, peer: Peer) -> None:
    """As many can open it as references were made, one after the other."""
    tensor = MemoryMappedTensor.full(BIG, fill_value=7, dtype=torch.uint8)
    references = [tensor.ref() for _ in range(3)]
    del tensor
    assert own_peer.call(value, references[0]) == 7
    assert peer.call(value, references[1]) == 7
    assert own_peer.call(value, references[2]) == 7
    until(lambda: not lease._leases)


def keep(reference: TensorRef) -> None:
    _kept.append(reference.open())


_kept: list[torch.Tensor] = []


def test_memory_that_is_mapped_already(own_peer: Peer) -> None:
    """A receiver that has the memory mapped still says that it opened another reference."""
    tensor = MemoryMappedTensor.full(3, fill_value=7)
    for _ in range(20):
        own_peer.call(keep, tensor.ref())
    until(lambda: not lease._leases)


def test_small_tensors_share_what_waits() -> None:
    """Many small tensors that were sent and dropped wait together, in a few files."""
    before = memory_files()
    references = [reference_to_dropped() for _ in range(1000)]
    assert len(memory_files() - before) <= 1
    assert all(reference.open()[0] == 7 for reference in references)
    assert memory_files() <= before


def test_old_news_end_no_lease(own_peer: Peer) -> None:
    """What receivers said when nobody listened is not taken for an answer to a later reference."""
    tensor = MemoryMappedTensor.full(BIG, fill_value=7, dtype=torch.uint8)
    reference = tensor.ref()
    own_peer.call(value, reference)
    until(lambda: not lease._is_watched)
    for _ in range(5):
        own_peer.call(value, reference)
    again = tensor.ref()
    del tensor
    assert lease._leases
    assert own_peer.call(value, again) == 7


def test_own_process_counts_as_a_receiver() -> None:
    """Pickling and unpickling in one process leaves nothing that waits."""
    before = memory_files()
    tensor = MemoryMappedTensor.ones(BIG, dtype=torch.uint8)
    again = pickle.loads(pickle.dumps(tensor))
    assert again.data_ptr() == tensor.data_ptr()
    del tensor, again
    assert memory_files() == before


def test_lease_ends_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that nobody opens keeps the memory for a while, not for ever."""
    monkeypatch.setattr(lease, "LEASE_S", 0.05)
    before = memory_files()
    reference = reference_to_dropped(BIG)
    until(lambda: memory_files() == before)
    with pytest.raises(StaleReferenceError, match="freed"):
        reference.open()


def test_memory_that_waits_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory is short, what only waits for receivers is given up first."""
    from mmrpc.core import memory

    before = memory_files()
    reference_to_dropped(BIG)
    assert memory_files() != before
    answers = iter([0, BIG])  # what is available before and after
    monkeypatch.setattr(memory, "available_bytes", lambda: next(answers))
    tensor = MemoryMappedTensor.zeros(BIG, dtype=torch.uint8)
    assert len(memory_files() - before) == 1
    del tensor


def fork_and_tell(reference: TensorRef) -> int:
    """Exit code of a forked child that sees whether a number names a pipe of ours."""
    tensor = MemoryMappedTensor.ones(3)
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        assert lease.bell_of(os.getpid(), memory_link(tensor)) is None
        new = MemoryMappedTensor.ones(3)
        os._exit(0 if memory_link(new) != memory_link(tensor) else 1)
    except BaseException:
        os._exit(2)


def memory_link(tensor: MemoryMappedTensor) -> str:
    return os.readlink(f"/proc/self/fd/{tensor.ref().location.fd}")


def test_child_has_a_pipe_of_its_own(own_peer: Peer) -> None:
    """A forked child does not take the messages that are meant for its parent."""
    assert own_peer.call(fork_and_tell, None) == 0


def test_nothing_is_written_to_a_descriptor_that_is_no_pipe() -> None:
    """A number that names another file by now is left alone."""
    read, write = os.pipe()
    try:
        inode = os.fstat(write).st_ino
        for other in (f"{write}-{inode + 1}", f"999-{inode}", "0-0"):
            assert lease.bell_of(os.getpid(), f"/memfd:mmrpc-{other} (deleted)") is None
        bell = lease.bell_of(os.getpid(), f"/memfd:mmrpc-{write}-{inode} (deleted)")
        assert bell is lease.bell_of(os.getpid(), f"/memfd:mmrpc-{write}-{inode} (deleted)")
        bell.ring(5)
        assert len(os.read(read, 100)) == 8
    finally:
        os.close(read)
        os.close(write)


def test_full_pipe(own_peer: Peer) -> None:
    """An owner that does not listen does not stop a receiver."""
    tensor = MemoryMappedTensor.full(3, fill_value=7)
    reference = tensor.ref()
    assert own_peer.call(open_often, reference, 20_000) == 7


def open_often(reference: TensorRef, count: int) -> float:
    for _ in range(count):
        tensor = reference.open()
    return float(tensor[0])


@pytest.mark.parametrize(
    "link", ["/memfd:other (deleted)", "/tmp/memfd:mmrpc-1-2", "/memfd:mmrpc-x"]
)
def test_other_files_are_not_ours(link: str) -> None:
    """Only a memory file that we named is taken for one."""
    assert not lease.is_memory(link)
