"""One live mapping for each file and mode of a process, shared by all that opens it."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor, TensorRef, errors
from mmrpc.core import mapping
from mmrpc.core.location import Mode
from tests.peers import Peer

OPENINGS = 70_000  # more than vm.max_map_count allows mappings
FILES = 10_000
NOFILE = 1024


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "x").write_bytes(bytes(range(64)))
    return str(tmp_path / "x")


def mappings(path: str) -> list[str]:
    """Lines of /proc/self/maps that are about a file, as addresses and permissions."""
    with open("/proc/self/maps") as maps:
        return [line.split()[:2] for line in maps if path in line]


def open_as(path: str, mode: str = "r+", count: int = 64) -> MemoryMappedTensor:
    return MemoryMappedTensor.from_filename(path, torch.uint8, (count,), mode=mode)


def test_file_is_mapped_once(path: str) -> None:
    """Opening a file again gives the same memory, and another mode gives its own."""
    first, second, private = open_as(path), open_as(path), open_as(path, "r")
    assert first.data_ptr() == second.data_ptr() != private.data_ptr()
    assert len(mappings(path)) == 2
    assert {line[1] for line in mappings(path)} == {"rw-s", "rw-p"}


def test_mapping_goes_with_the_last_view(path: str) -> None:
    """A file stays mapped as long as any view of it lives, plain ones too, and no longer."""
    x = open_as(path)
    view = x.view(8, 8).t()[1:]
    array = x.numpy()
    del x
    gc.collect()
    assert len(mappings(path)) == 1
    assert view[0, 0] == 1
    del view
    assert len(mappings(path)) == 1
    del array
    gc.collect()
    assert mappings(path) == []


def test_descriptors_are_not_kept(path: str) -> None:
    """A mapped file needs no descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    x = open_as(path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert x[5] == 5


def hold_openings(path: str) -> int:
    held = [open_as(path) for _ in range(OPENINGS)]
    assert len({x.data_ptr() for x in held}) == 1
    return len(mappings(path))


def test_seventy_thousand_openings(path: str) -> None:
    """One file can be opened more often than a process may have mappings."""
    with open("/proc/sys/vm/max_map_count") as limit:
        assert int(limit.read()) < OPENINGS or OPENINGS > 65_530
    with Peer(nofile=NOFILE) as peer:
        assert peer.call(hold_openings, path) == 1


def hold_files(directory: str) -> int:
    held = []
    for number in range(FILES):
        value = torch.tensor([number])
        held.append(MemoryMappedTensor.from_tensor(value, filename=f"{directory}/{number}"))
    return sum(int(x) for x in held) + len(mappings(directory))


def test_ten_thousand_files(tmp_path: Path) -> None:
    """Files held at once are not limited by the number of open files."""
    with Peer(nofile=NOFILE) as peer:
        assert peer.call(hold_files, str(tmp_path)) == sum(range(FILES)) + FILES


def test_threads_get_one_mapping(path: str) -> None:
    """Threads that open and drop a file at once agree on one mapping at each moment."""
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def use() -> None:
        try:
            start.wait()
            for _ in range(300):
                x, y = open_as(path), open_as(path)
                assert x.data_ptr() == y.data_ptr()
                assert x[63] == 63
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    gc.collect()
    assert mappings(path) == []


def open_while_unmapped(opens: Callable[[], MemoryMappedTensor]) -> bool:
    """Opens on another thread what this one is unmapping; gives whether it got other pages."""
    unmapping, opened = threading.Event(), threading.Event()
    munmap = mapping.libc.munmap
    found: list[MemoryMappedTensor] = []

    def slow_munmap(address: int, nbytes: int) -> None:
        unmapping.set()
        opened.wait(30)
        munmap(address, nbytes)

    def open_then() -> None:
        unmapping.wait(30)
        found.append(opens())
        opened.set()

    thread = threading.Thread(target=open_then)
    thread.start()
    x = opens()
    address = x.data_ptr()
    mapping.libc.munmap = slow_munmap
    del x
    thread.join()
    mapping.libc.munmap = munmap
    return found[0].data_ptr() != address and float(found[0].sum()) > 0


def open_file_while_unmapped(path: str) -> bool:
    return open_while_unmapped(lambda: open_as(path))


def open_memory_while_unmapped(reference: TensorRef) -> bool:
    return open_while_unmapped(reference.open)


def test_what_is_being_unmapped_is_not_reused(path: str) -> None:
    """A thread that opens what another is just dropping gets a mapping of its own."""
    with Peer() as peer:  # it would not survive a mistake here
        assert peer.call(open_file_while_unmapped, path)
        x = MemoryMappedTensor.ones(3)
        assert peer.call(open_memory_while_unmapped, x.ref())


def run_in_fork(check: Callable[[], None]) -> None:
    """Runs a check in a forked child, with what the parent has mapped."""
    pid = os.fork()
    if not pid:
        try:
            check()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def fork_while_locked(path: str) -> int:
    x = open_as(path)

    def check() -> None:
        again = open_as(path)
        assert again.data_ptr() == x.data_ptr()
        again[0] = 77
        open_as(path, "r")

    with mapping._lock:  # as another thread of the parent may have it
        run_in_fork(check)
    return int(x[0])


def test_fork(path: str, peer: Peer) -> None:
    """A forked child goes on with what is mapped, and writes through it."""
    assert peer.call(fork_while_locked, path) == 77


class TestReuse:
    """A mapping is reused only for the very file that it maps."""

    def test_replaced_file(self, path: str) -> None:
        """After a rename over it, the path leads to the new file, and the old map is whole."""
        old = open_as(path)
        Path(path + ".new").write_bytes(b"\7" * 64)
        os.replace(path + ".new", path)
        assert open_as(path).tolist() == [7] * 64
        assert old.tolist() == list(range(64))

    def test_recreated_file(self, path: str) -> None:
        """A deleted file's inode number, given to a new file, does not make it the old one."""
        old = open_as(path)
        os.unlink(path)
        Path(path).write_bytes(b"\7" * 64)
        assert open_as(path).tolist() == [7] * 64
        assert old.tolist() == list(range(64))

    def test_grown_file(self, path: str) -> None:
        """A file that was appended to can be opened to its new length."""
        old = open_as(path)
        with open(path, "ab") as file:
            file.write(b"\7" * 64)
        new = open_as(path, count=128)
        assert new[-1] == 7
        new[0] = 99
        assert old[0] == 99

    def test_cut_file(self, path: str) -> None:
        """A mapped file that was truncated is too short for whoever opens it now."""
        held = open_as(path)
        os.truncate(path, 10)
        with pytest.raises(errors.FileTooShortError) as caught:
            open_as(path)
        assert (caught.value.needed_bytes, caught.value.actual_bytes) == (64, 10)
        assert open_as(path, count=10).tolist() == list(range(10))
        assert held[3] == 3

    def test_deleted_file(self, path: str) -> None:
        """A mapped file whose name is gone is not found by whoever opens it now."""
        held = open_as(path)
        os.unlink(path)
        with pytest.raises(errors.PathNotFoundError):
            open_as(path)
        assert held[3] == 3

    def test_private_writes(self, path: str) -> None:
        """Who opens a file copy-on-write sees the file, not what somebody wrote over it."""
        changed = open_as(path, "r")
        assert open_as(path, "r").data_ptr() == changed.data_ptr()
        changed[0] = 99
        assert open_as(path, "r")[0] == 0
        assert changed[0] == 99

    def test_revoked_permission(self, path: str) -> None:
        """A link that takes over the name of a mapped file is not followed to another file."""
        held = open_as(path)
        os.rename(path, path + ".real")
        Path(path + ".other").write_bytes(b"\7" * 64)
        os.symlink(path + ".other", path)
        with pytest.raises(errors.NotRegularFileError):
            open_as(path)
        assert held[1] == 1


def test_check_is_called_for_reused_mappings(path: str) -> None:
    """A resolver's check sees the file each time, mapped already or not."""
    seen: Counter[bytes] = Counter()
    held = [
        mapping.map_file(
            path, Mode.WRITE, 64, check=lambda found, _: seen.update([found.generation])
        )
        for _ in range(3)
    ]
    assert list(seen.values()) == [3]
    assert held[0] is held[2]


def test_empty_file(tmp_path: Path) -> None:
    """A file without bytes is mapped as nothing."""
    (tmp_path / "x").touch()
    x = open_as(str(tmp_path / "x"), count=0)
    assert x.shape == (0,)
    assert x.filename == str(tmp_path / "x")
    with pytest.raises(errors.FileTooShortError):
        open_as(str(tmp_path / "x"), count=1)


def test_too_many_mappings(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernel maps no more, the error names the path."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mapping.libc, "mmap", refuse)
    with pytest.raises(errors.PathError, match="cannot allocate memory") as caught:
        open_as(path)
    assert caught.value.path == path
