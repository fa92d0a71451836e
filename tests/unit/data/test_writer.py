"""Writing datasets: appending, committing, failing, being killed, and many writers at once."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrpc.data import Column, DatasetWriter, MappedDataset, RangeWriter, missing_rows, plan
from mmrpc.errors import (
    LayoutError,
    MmrpcError,
    NoSpaceError,
    PathExistsError,
    PathNotFoundError,
)

_spawn = multiprocessing.get_context("spawn")


def batch(start: int, stop: int) -> dict[str, torch.Tensor]:
    """Rows whose values are their numbers."""
    rows = torch.arange(start, stop)
    return {"x": rows.float()[:, None].expand(-1, 4), "y": rows}


def is_exact(ds: MappedDataset, rows: int) -> bool:
    whole = batch(0, rows)
    return len(ds) == rows and all(torch.equal(ds[:][name], whole[name]) for name in whole)


@contextlib.contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """No file can grow beyond a limit, as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


class TestAppending:
    def test_batches_of_any_length(self, tmp_path: Path) -> None:
        """Rows come one behind the other; the files are as long as their rows."""
        with DatasetWriter(tmp_path / "ds") as writer:
            for start, stop in ((0, 3), (3, 3), (3, 4), (4, 1000)):
                writer.append(batch(start, stop))
            assert writer.rows == 1000
        assert is_exact(MappedDataset(tmp_path / "ds"), 1000)
        assert os.path.getsize(tmp_path / "ds" / "x.memmap") == 16_000
        assert sorted(os.listdir(tmp_path / "ds")) == ["meta.json", "x.memmap", "y.memmap"]

    def test_nothing_is_seen_before_commit(self, tmp_path: Path) -> None:
        """Readers see what was committed, complete, and no dataset before."""
        with DatasetWriter(tmp_path / "ds") as writer:
            writer.append(batch(0, 10))
            with pytest.raises(PathNotFoundError):
                MappedDataset(tmp_path / "ds")
            assert writer.commit() == 10
            writer.append(batch(10, 20))
            early = MappedDataset(tmp_path / "ds")
            assert is_exact(early, 10)
            assert not early.is_closed
        assert is_exact(early, 10)
        late = MappedDataset(tmp_path / "ds")
        assert is_exact(late, 20)
        assert late.is_closed

    def test_a_dataset_grows(self, tmp_path: Path) -> None:
        """Appending later keeps those rows that are there, mapped or not."""
        old = MappedDataset.from_tensors(tmp_path / "ds", batch(0, 5))
        with DatasetWriter(tmp_path / "ds", append=True) as writer:
            writer.append(batch(5, 9))
        assert is_exact(old, 5)
        assert is_exact(MappedDataset(tmp_path / "ds"), 9)

    def test_from_an_iterable(self, tmp_path: Path) -> None:
        """from_batches takes a generator, and keeps one batch in memory at most."""
        batches = (batch(i, i + 10) for i in range(0, 100, 10))
        assert is_exact(MappedDataset.from_batches(tmp_path / "ds", batches), 100)

    def test_columns_may_be_declared(self, tmp_path: Path) -> None:
        """With columns given, a dataset may have no rows at all."""
        with DatasetWriter(tmp_path / "ds", {"y": (torch.int8, (2,))}):
            pass
        assert MappedDataset(tmp_path / "ds")[:]["y"].shape == (0, 2)
        with pytest.raises(LayoutError, match="columns are unknown"), DatasetWriter(tmp_path / "e"):
            pass
        assert not (tmp_path / "e").exists()

    @pytest.mark.parametrize(
        ("bad", "match"),
        [
            ({"x": torch.ones(1, 4)}, "columns"),
            ({"x": torch.ones(1, 4), "y": torch.ones(1)}, "int64"),
            ({"x": torch.ones(1, 5), "y": torch.arange(1)}, r"\(4,\)"),
            ({"x": torch.ones(1, 4), "y": torch.arange(2)}, "1 in 'x', 2 in 'y'"),
            ({"x": torch.ones(1, 4), "y": torch.tensor(2)}, "same number of rows"),
            ({}, "same number of rows"),
        ],
    )
    def test_a_bad_batch_changes_nothing(
        self, tmp_path: Path, bad: dict[str, torch.Tensor], match: str
    ) -> None:
        """A batch that does not fit is refused, and the next one is taken."""
        with DatasetWriter(tmp_path / "ds") as writer:
            writer.append(batch(0, 2))
            with pytest.raises(LayoutError, match=match):
                writer.append(bad)
            writer.append(batch(2, 4))
        assert is_exact(MappedDataset(tmp_path / "ds"), 4)


class TestFailing:
    def test_an_exception_drops_what_was_not_committed(self, tmp_path: Path) -> None:
        """Leaving with an exception leaves the committed rows, or no dataset."""
        with contextlib.suppress(ZeroDivisionError), DatasetWriter(tmp_path / "a") as writer:
            writer.append(batch(0, 2))
            raise ZeroDivisionError
        assert os.listdir(tmp_path) == []
        with contextlib.suppress(ZeroDivisionError), DatasetWriter(tmp_path / "b") as writer:
            writer.append(batch(0, 2))
            writer.commit()
            writer.append(batch(2, 4))
            raise ZeroDivisionError
        assert is_exact(MappedDataset(tmp_path / "b"), 2)
        assert os.path.getsize(tmp_path / "b" / "y.memmap") == 16

    def test_a_full_disk(self, tmp_path: Path) -> None:
        """Too little space is an error; the writer keeps the rows before and can go on."""
        with DatasetWriter(tmp_path / "ds") as writer:
            writer.append(batch(0, 10))
            with small_files(4096), pytest.raises(NoSpaceError):
                writer.append(batch(10, 400_000))
            assert os.path.getsize(tmp_path / "ds" / "x.memmap") == 160
            writer.append(batch(10, 20))
        assert is_exact(MappedDataset(tmp_path / "ds"), 20)

    def test_a_failed_iterable_leaves_nothing(self, tmp_path: Path) -> None:
        """from_batches is all or nothing."""

        def batches() -> Iterator[dict[str, torch.Tensor]]:
            yield batch(0, 5)
            raise OSError("the source broke")

        with pytest.raises(OSError, match="the source broke"):
            MappedDataset.from_batches(tmp_path / "ds", batches())
        assert os.listdir(tmp_path) == []

    def test_what_cannot_be_written_is_typed(self, tmp_path: Path) -> None:
        """A directory in the place of a column, or one that goes away, is an error of ours."""
        (tmp_path / "taken" / "x.memmap").mkdir(parents=True)
        with pytest.raises(MmrpcError, match=r"x\.memmap"):
            MappedDataset.from_tensors(tmp_path / "taken", batch(0, 3))
        assert os.listdir(tmp_path / "taken") == ["x.memmap"]
        writer = DatasetWriter(tmp_path / "gone")
        writer.append(batch(0, 3))
        shutil.rmtree(tmp_path / "gone")
        with pytest.raises(PathNotFoundError, match="does not exist"):
            writer.close()

    @pytest.mark.parametrize(
        "column", [torch.float32, (torch.float32, 3), (torch.float32, (-1,)), None]
    )
    def test_what_is_no_column(self, tmp_path: Path, column: Any) -> None:
        """It is refused, and no directory is left."""
        with pytest.raises(LayoutError):
            DatasetWriter(tmp_path / "ds", {"x": column})
        with pytest.raises(LayoutError):
            plan(tmp_path / "ds", 3, {"x": column})
        assert not (tmp_path / "ds").exists()

    def test_what_is_no_tensor(self, tmp_path: Path) -> None:
        """A list is not guessed a dtype for."""
        with pytest.raises(LayoutError, match="column 'x' is of type list"):
            MappedDataset.from_tensors(tmp_path / "ds", {"x": [1, 2]})  # type: ignore[dict-item]

    def test_more_rows_than_a_file_can_have(self, tmp_path: Path) -> None:
        """It is too little space, and nothing is left."""
        for rows in (1 << 50, 1 << 62):
            with pytest.raises(NoSpaceError):
                plan(tmp_path / "ds", rows, {"x": (torch.float32, (1000,))})
            assert not (tmp_path / "ds").exists()

    def test_a_closed_writer(self, tmp_path: Path) -> None:
        """Closing twice is fine; writing afterwards is not."""
        writer = DatasetWriter(tmp_path / "ds")
        writer.append(batch(0, 1))
        writer.close()
        writer.close()
        with pytest.raises(MmrpcError, match="closed"):
            writer.append(batch(1, 2))

    def test_other_columns_than_there(self, tmp_path: Path) -> None:
        """Appending with other columns, or replacing and appending at once, is refused."""
        MappedDataset.from_tensors(tmp_path / "ds", batch(0, 5))
        with pytest.raises(LayoutError, match="other columns"):
            DatasetWriter(tmp_path / "ds", {"y": Column(torch.int8)}, append=True)
        with pytest.raises(LayoutError, match="either"):
            DatasetWriter(tmp_path / "ds", append=True, existsok=True)
        assert is_exact(MappedDataset(tmp_path / "ds"), 5)


def _hold(path: str, told: Connection) -> None:
    """Commits 10 rows, writes 10 more, and waits to be killed."""
    writer = DatasetWriter(path)
    writer.append(batch(0, 10))
    writer.commit()
    writer.append({"x": torch.full((10, 4), -1.0), "y": torch.full((10,), -1)})
    told.send("written")
    signal.pause()


def _append_for_ever(path: str, told: Connection) -> None:
    """Appends and commits batches until it is killed."""
    writer = DatasetWriter(path)
    for start in itertools.count(0, 7):
        writer.append(batch(start, start + 7))
        writer.commit()
        told.send(writer.rows)


@contextlib.contextmanager
def running(target: Any, *args: Any) -> Iterator[tuple[Any, Connection]]:
    receive, send = _spawn.Pipe(duplex=False)
    process = _spawn.Process(target=target, args=(*args, send), daemon=True)
    process.start()
    send.close()
    try:
        yield process, receive
    finally:
        process.kill()
        process.join()
        receive.close()


class TestKilling:
    def test_a_killed_writer(self, tmp_path: Path) -> None:
        """What it committed is whole; another goes on behind it."""
        path = str(tmp_path / "ds")
        with running(_hold, path) as (process, told):
            assert told.poll(60)
            assert told.recv() == "written"
            with pytest.raises(PathExistsError, match=f"by process {process.pid}"):
                DatasetWriter(path, append=True)
        assert is_exact(MappedDataset(path), 10)
        with DatasetWriter(path, append=True) as writer:
            assert writer.rows == 10
            writer.append(batch(10, 15))
        assert is_exact(MappedDataset(path), 15)

    def test_readers_of_a_growing_dataset(self, tmp_path: Path) -> None:
        """Whenever it is opened while it grows, all rows that it has are complete."""
        path = str(tmp_path / "ds")
        with running(_append_for_ever, path) as (_, told):
            assert told.poll(60)
            seen = set()
            for _ in range(60):
                told.recv()
                ds = MappedDataset(path)
                assert is_exact(ds, len(ds))
                assert len(ds) % 7 == 0
                seen.add(len(ds))
        assert len(seen) > 1
        assert is_exact(MappedDataset(path), len(MappedDataset(path)))

    def test_a_forgotten_writer(self, tmp_path: Path) -> None:
        """A writer that is collected without being closed gives its claim and files up."""
        writer = DatasetWriter(tmp_path / "ds")
        writer.append(batch(0, 5))
        before = len(os.listdir("/proc/self/fd"))
        del writer
        assert len(os.listdir("/proc/self/fd")) == before - 2
        with DatasetWriter(tmp_path / "ds") as writer:
            writer.append(batch(0, 3))
        assert is_exact(MappedDataset(tmp_path / "ds"), 3)


COLUMNS = {"x": (torch.float32, (4,)), "y": (torch.int64, ())}


def _write_range(path: str, start: int, stop: int, told: Connection) -> None:
    with RangeWriter(path, start, stop) as writer:
        for first in range(start, stop, 10):
            writer.write(batch(first, min(first + 10, stop)))
    told.send("done")


def _claim_and_wait(path: str, start: int, stop: int, told: Connection) -> None:
    writer = RangeWriter(path, start, stop)
    writer.write(batch(start, start + 1))
    told.send("claimed")
    signal.pause()


class TestRanges:
    def test_many_processes(self, tmp_path: Path) -> None:
        """Each process writes its range; with the last one the dataset is there, and exact."""
        path = str(tmp_path / "ds")
        plan(path, 100, COLUMNS)
        assert missing_rows(path) == [(0, 100)]
        with contextlib.ExitStack() as stack:
            told = [
                stack.enter_context(running(_write_range, path, start, stop))[1]
                for start, stop in ((0, 33), (33, 34), (34, 100))
            ]
            assert all(pipe.poll(90) and pipe.recv() == "done" for pipe in told)
        assert is_exact(MappedDataset(path), 100)
        assert sorted(os.listdir(path)) == ["meta.json", "x.memmap", "y.memmap"]
        with pytest.raises(PathNotFoundError, match="no dataset is being written"):
            missing_rows(path)

    def test_threads_finish_at_once(self, tmp_path: Path) -> None:
        """However the last ranges end, exactly one complete dataset is there."""
        plan(tmp_path / "ds", 64, COLUMNS)
        barrier, errors = threading.Barrier(8), []

        def work(start: int) -> None:
            try:
                with RangeWriter(tmp_path / "ds", start, start + 8) as writer:
                    writer.write(batch(start, start + 8))
                    barrier.wait(30)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 64, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert is_exact(MappedDataset(tmp_path / "ds"), 64)

    def test_not_before_all_is_done(self, tmp_path: Path) -> None:
        """With rows missing there is no dataset; which are missing can be asked."""
        plan(tmp_path / "ds", 30, COLUMNS)
        with RangeWriter(tmp_path / "ds", 10, 20) as writer:
            writer.write(batch(10, 20))
        assert missing_rows(tmp_path / "ds") == [(0, 10), (20, 30)]
        with pytest.raises(PathNotFoundError):
            MappedDataset(tmp_path / "ds")

    def test_a_killed_range_is_written_again(self, tmp_path: Path) -> None:
        """A range is its claimer's while it lives, and free when it was killed."""
        path = str(tmp_path / "ds")
        plan(path, 10, COLUMNS)
        with running(_claim_and_wait, path, 0, 10) as (_, told):
            assert told.poll(60)
            for start, stop in ((0, 10), (5, 6)):
                with pytest.raises(PathExistsError):
                    RangeWriter(path, start, stop)
        assert missing_rows(path) == [(0, 10)]
        with RangeWriter(path, 0, 10) as writer:
            writer.write(batch(0, 10))
        assert is_exact(MappedDataset(path), 10)

    def test_what_a_range_refuses(self, tmp_path: Path) -> None:
        """Rows beyond it, too few rows, ranges beyond the dataset, and rows that are done."""
        path = tmp_path / "ds"
        plan(path, 10, COLUMNS)
        with pytest.raises(LayoutError, match="no rows 5 to 11"):
            RangeWriter(path, 5, 11)
        with RangeWriter(path, 0, 3) as writer:
            with pytest.raises(LayoutError, match="4 rows were given and the range has 3 left"):
                writer.write(batch(0, 4))
            writer.write(batch(0, 1))
            with pytest.raises(LayoutError, match="lacks its last 2 rows"):
                writer.close()
        with RangeWriter(path, 0, 3) as writer:
            writer.write(batch(0, 3))
        with pytest.raises(PathExistsError, match="written already"):
            RangeWriter(path, 2, 5)
        assert missing_rows(path) == [(3, 10)]

    def test_planning(self, tmp_path: Path) -> None:
        """A plan is made once, for a directory without a dataset, with all space reserved."""
        with pytest.raises(PathNotFoundError, match="Call plan"):
            RangeWriter(tmp_path, 0, 1)
        with small_files(4096), pytest.raises(NoSpaceError):
            plan(tmp_path / "big", 2**20, COLUMNS)
        assert os.listdir(tmp_path) == []
        plan(tmp_path / "ds", 4, COLUMNS)
        with pytest.raises(PathExistsError, match="being written"):
            plan(tmp_path / "ds", 4, COLUMNS)
        MappedDataset.from_tensors(tmp_path / "there", batch(0, 2))
        with pytest.raises(PathExistsError, match="is there already"):
            plan(tmp_path / "there", 4, COLUMNS)
        with pytest.raises(LayoutError, match="0 columns"):
            plan(tmp_path / "none", 4, {})
