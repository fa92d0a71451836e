"""flush, advise and check."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors
from mmrpc.core.system import libc

M = MemoryMappedTensor
COUNT = 1 << 14  # 16 pages of float32


@pytest.fixture
def x(tmp_path: Path) -> MemoryMappedTensor:
    return M.zeros(COUNT, filename=tmp_path / "x")


@pytest.fixture
def private(x: MemoryMappedTensor) -> MemoryMappedTensor:
    return M.from_filename(x.filename, x.dtype, x.shape, mode="r")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Address, length and whether to wait, of each msync(2)."""
    calls: list[tuple[int, int, bool]] = []
    real = libc.msync

    def msync(address: int, nbytes: int, *, wait: bool) -> None:
        calls.append((address, nbytes, wait))
        real(address, nbytes, wait=wait)

    monkeypatch.setattr(libc, "msync", msync)
    return calls


class TestFlush:
    """What is written is on the file system when flush returns."""

    def test_whole(self, x: MemoryMappedTensor, synced: list[tuple[int, int, bool]]) -> None:
        """All pages of the tensor are synchronised, and waited for."""
        x.fill_(1)
        x.flush()
        assert synced == [(x.data_ptr(), COUNT * 4, True)]

    def test_part(self, x: MemoryMappedTensor, synced: list[tuple[int, int, bool]]) -> None:
        """A view flushes its own pages only, from a page boundary on."""
        x[2000:2003].flush(async_=True)
        page = x.data_ptr() + 4096
        assert synced == [(page, 2003 * 4 - 4096, False)]

    def test_nothing_to_do(
        self, private: MemoryMappedTensor, synced: list[tuple[int, int, bool]]
    ) -> None:
        """Memory, empty tensors, unwritten private maps and plain memory have nowhere to go."""
        for tensor in (M.ones(3), private, private[:0], M(torch.ones(2))):
            tensor.flush()
        assert synced == []

    def test_private_writes(self, private: MemoryMappedTensor) -> None:
        """What was written to a private map cannot be flushed, which is said."""
        private[0] = 1
        with pytest.raises(errors.NotSharedError, match="in no file"):
            private.flush()
        private[COUNT // 2 :].flush()

    def test_error(self, x: MemoryMappedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
        """A device that fails is an error with the path."""

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(libc, "msync", fail)
        with pytest.raises(errors.NoSpaceError) as caught:
            x.flush()
        assert caught.value.path == x.filename


class TestAdvise:
    """The kernel is told how a tensor will be read."""

    @pytest.mark.parametrize("advice", list(libc.ADVICE))
    def test_accepted(
        self, advice: str, x: MemoryMappedTensor, private: MemoryMappedTensor
    ) -> None:
        """No advice changes a value, whatever it is given for."""
        memory = M.full(COUNT, fill_value=2)
        x[1], private[2] = 5, 6
        for tensor in (x, x[1:2], x[5:5], private, memory, memory[1:], M(torch.ones(2))):
            before = tensor.clone()
            tensor.advise(advice)
            assert torch.equal(tensor, before)

    def test_drops_pages(self, x: MemoryMappedTensor) -> None:
        """ "dontneed" takes a file's pages out of this process."""
        x.fill_(1)
        before = resident_bytes(x)
        x.advise("dontneed")
        assert before >= COUNT * 4 > resident_bytes(x)
        assert x.sum() == COUNT

    def test_unknown(self, x: MemoryMappedTensor) -> None:
        """Other advice is refused, with those that there are."""
        with pytest.raises(ValueError, match="sequential"):
            x.advise("quickly")

    def test_kernel_without_it(
        self, x: MemoryMappedTensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Advice that a kernel lacks is no error; what fails otherwise is."""
        codes = iter([errno.EINVAL, errno.EIO])

        def fail(*_: object) -> None:
            raise OSError(next(codes), "x")

        monkeypatch.setattr(libc, "madvise", fail)
        x.advise("hugepage")
        with pytest.raises(errors.PathError):
            x.advise("hugepage")


def resident_bytes(x: MemoryMappedTensor) -> int:
    """How much of a tensor's file is in the page tables of this process."""
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        for line in lines:
            if line.startswith(f"{x.data_ptr():08x}-"):
                return next(int(n.split()[1]) * 1024 for n in lines if n.startswith("Rss:"))
    raise AssertionError("it is not mapped")


class TestCheck:
    """Is what is mapped still there, whole and the same?"""

    def test_good(self, x: MemoryMappedTensor, private: MemoryMappedTensor) -> None:
        """A file that is as it was passes, and so does memory."""
        for tensor in (x, x[5:], private, M.ones(3), M.zeros(0)):
            tensor.check()

    @pytest.mark.parametrize(
        ("harm", "kind"),
        [
            (os.unlink, errors.PathNotFoundError),
            (lambda path: os.truncate(path, 100), errors.FileTooShortError),
            (lambda path: os.rename(path, path + "2"), errors.PathNotFoundError),
        ],
    )
    def test_harmed(
        self, harm: Callable[[str], None], kind: type[Exception], x: MemoryMappedTensor
    ) -> None:
        """A file that is gone or cut is said to be."""
        harm(x.filename)
        with pytest.raises(kind):
            x.check()

    def test_part_that_is_whole(self, x: MemoryMappedTensor) -> None:
        """A view is checked for what it covers."""
        os.truncate(x.filename, 4096)
        x[:1024].check()
        with pytest.raises(errors.FileTooShortError):
            x[:1025].check()

    def test_replaced(self, x: MemoryMappedTensor) -> None:
        """Another file of that name is not what is mapped here, which is whole."""
        M.ones(COUNT, filename=x.filename, existsok=True)
        with pytest.raises(errors.StaleReferenceError, match="the old file"):
            x.check()
        assert x.sum() == 0

    def test_own_memory(self) -> None:
        """Plain memory has nothing to check."""
        with pytest.raises(errors.NotSharedError):
            M(torch.ones(2)).check()
