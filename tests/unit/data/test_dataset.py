"""Reading datasets: rows, batches, orders, transforms, and what travels."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import mmrpc
from mmrpc import MemoryMappedTensor
from mmrpc.core.resolver import HostResolver, set_resolver
from mmrpc.data import MappedDataset
from mmrpc.errors import (
    ConfigError,
    FileTooShortError,
    LayoutError,
    NotSharedError,
    PathExistsError,
    PathNotFoundError,
    StaleReferenceError,
)
from mmrpc.paths.mounts import Mount, MountTable
from mmrpc.paths.resolver import ClusterResolver

N = 40


def columns(n: int = N) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(n * 6, dtype=torch.float32).view(n, 2, 3), "y": torch.arange(n)}


@pytest.fixture
def ds(tmp_path: Path) -> MappedDataset:
    return MappedDataset.from_tensors(tmp_path / "ds", columns())


def _is_view(tensor: torch.Tensor) -> bool:
    return mmrpc.core.reference.is_mapped(tensor)


class TestReading:
    def test_a_row(self, ds: MappedDataset) -> None:
        """ds[i] is a dict of views; negative and NumPy integers count, others are IndexErrors."""
        assert torch.equal(ds[3]["x"], columns()["x"][3])
        assert _is_view(ds[3]["x"])
        assert ds[-1]["y"] == N - 1
        assert ds[np.int64(2)]["y"] == 2
        assert ds[torch.tensor(2)]["y"] == 2
        for bad in (N, -N - 1):
            for dataset in (ds, ds.shuffle()):
                with pytest.raises(IndexError):
                    dataset[bad]

    def test_a_slice(self, ds: MappedDataset) -> None:
        """ds[a:b] is a batch of views."""
        batch = ds[5:20:3]
        assert batch["y"].tolist() == list(range(5, 20, 3))
        assert _is_view(batch["x"])
        assert ds[30:10]["y"].tolist() == []
        assert ds[-3:]["y"].tolist() == [37, 38, 39]
        with pytest.raises(LayoutError, match="forward"):
            ds[::-1]

    @pytest.mark.parametrize(
        "index",
        [
            [3, 1, 3, -1],
            torch.tensor([3, 1, 3, -1]),
            torch.tensor([3, 1, 3, 39], dtype=torch.int32),
            np.array([3, 1, 3, -1]),
            range(4),
            [],
            torch.arange(N) % 7 == 0,
        ],
        ids=str,
    )
    def test_a_gather(self, ds: MappedDataset, index: Any) -> None:
        """Lists, arrays, ranges and masks gather rows into new memory, as torch would."""
        batch = ds[index]
        wanted = torch.as_tensor(index)
        wanted = wanted if wanted.numel() else wanted.long()
        for name, column in columns().items():
            assert torch.equal(batch[name], column[wanted])
        assert not _is_view(batch["x"])

    @pytest.mark.parametrize("bad", [[N], [0, -N - 1], [2**40]])
    def test_rows_that_are_not_there(self, ds: MappedDataset, bad: list[int]) -> None:
        """A gather of a missing row is an IndexError that names it."""
        for dataset in (ds, ds.shuffle()):
            with pytest.raises(IndexError, match=str(bad[-1])):
                dataset[bad]

    @pytest.mark.parametrize(
        "bad", [[1.5], torch.zeros(2, 2, dtype=torch.int64), (1, 2), None, [[1], [2, 3]]]
    )
    def test_no_rows(self, ds: MappedDataset, bad: Any) -> None:
        """What is no list of rows is refused."""
        with pytest.raises(LayoutError):
            ds[bad]
        with pytest.raises(IndexError, match="mask"):
            ds[torch.ones(3, dtype=torch.bool)]

    def test_a_column(self, ds: MappedDataset) -> None:
        """ds["name"] is the whole column, mapped, in the order of the dataset."""
        assert isinstance(ds["y"], MemoryMappedTensor)
        assert ds["y"].tolist() == list(range(N))
        assert ds.select(range(2, 10, 2))["y"].tolist() == [2, 4, 6, 8]
        assert _is_view(ds.select(range(2, 10, 2))["y"])
        assert sorted(ds.shuffle()["y"].tolist()) == list(range(N))
        with pytest.raises(LayoutError, match="no column 'z'"):
            ds["z"]

    def test_iteration_length_and_repr(self, ds: MappedDataset) -> None:
        """It is a sequence of rows that says what it is."""
        assert len(ds) == N
        assert [int(row["y"]) for row in ds] == list(range(N))
        assert repr(ds) == "MappedDataset(40 rows; x: float32[2, 3], y: int64[])"
        assert ds.columns == ("x", "y")
        assert ds.nbytes == N * 32

    def test_writes_stay_here_by_default(self, tmp_path: Path, ds: MappedDataset) -> None:
        """Reading mode is private; "r+" changes the file."""
        ds[0]["y"].fill_(7)
        assert MappedDataset(tmp_path / "ds")[0]["y"] == 0
        MappedDataset(tmp_path / "ds", mode="r+")[0]["y"].fill_(8)
        assert MappedDataset(tmp_path / "ds")[0]["y"] == 8


class TestOrders:
    def test_shuffle_is_the_same_everywhere(self, ds: MappedDataset) -> None:
        """One seed gives one order, another seed another; all rows are there."""
        a, b, c = (ds.shuffle(seed)["y"].tolist() for seed in (1, 1, 2))
        assert a == b != c
        assert sorted(a) == list(range(N))

    def test_split(self, ds: MappedDataset) -> None:
        """Fractions or counts cut the rows into parts without a rest."""
        train, test = ds.split(0.75, 0.25)
        assert (len(train), len(test)) == (30, 10)
        a, b = ds.split(25, 15, seed=3)
        assert sorted(a["y"].tolist() + b["y"].tolist()) == list(range(N))
        assert a["y"].tolist() != list(range(25))
        for bad in ((0.5, 0.6), (10, 10), ()):
            with pytest.raises(LayoutError, match="neither"):
                ds.split(*bad)
        for bad in ((1.5, -0.5), (-1, N + 1)):
            with pytest.raises(LayoutError, match="negative part"):
                ds.split(*bad)

    def test_shards_cover_all(self, ds: MappedDataset) -> None:
        """The shards of all ranks are all rows, none twice, and differ by one row at most."""
        shards = [ds.shard(rank, 3)["y"].tolist() for rank in range(3)]
        assert [row for shard in shards for row in shard] == list(range(N))
        assert {len(shard) for shard in shards} == {13, 14}
        with pytest.raises(LayoutError, match="no rank 3 among 3"):
            ds.shard(3, 3)
        with pytest.raises(LayoutError, match="the rank is unknown"):
            ds.shard()

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_steps_compose(self, ds: MappedDataset, data: st.DataObject) -> None:
        """Any chain of steps shows what the same chain does to a list, and survives pickling."""
        wanted = list(range(N))
        shown: MappedDataset = ds
        for _ in range(data.draw(st.integers(0, 4))):
            kind = data.draw(st.sampled_from(["range", "pick", "shuffle", "shard"]))
            if kind == "range":
                start, stop = data.draw(st.integers(0, N)), data.draw(st.integers(0, N))
                chosen = range(start, stop, data.draw(st.integers(1, 3)))
                shown, wanted = shown.select(chosen), wanted[start : stop : chosen.step]
            elif kind == "pick" and wanted:
                rows = data.draw(st.lists(st.integers(-len(wanted), len(wanted) - 1), max_size=5))
                shown, wanted = shown.select(rows), [wanted[i] for i in rows]
            elif kind == "shard":
                shown, wanted = shown.shard(1, 2), wanted[len(wanted) // 2 :]
            else:
                shown = shown.shuffle(4)
                order = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(4))
                wanted = [wanted[i] for i in order.tolist()]
        for dataset in (shown, pickle.loads(pickle.dumps(shown))):
            assert len(dataset) == len(wanted)
            assert dataset["y"].tolist() == wanted
            assert dataset[:]["y"].tolist() == wanted
            assert [int(row["y"]) for row in dataset] == wanted
            assert dataset[list(range(len(wanted)))]["y"].tolist() == wanted

    def test_a_pick_of_a_missing_row(self, ds: MappedDataset) -> None:
        """It is an error at once, not when the row is read."""
        with pytest.raises(IndexError):
            ds.select([0, N])

    def test_fewer_columns(self, ds: MappedDataset) -> None:
        """Columns can be left out, of what is read and of what is sent."""
        assert ds.select_columns("y")[2].keys() == {"y"}
        assert len(pickle.dumps(ds.select_columns("y"))) < len(pickle.dumps(ds))
        with pytest.raises(LayoutError, match="no columns"):
            ds.select_columns("y", "z")


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"x2": row["x"] * 2, "y": row["y"]}


def total(batch: dict[str, Any]) -> dict[str, Any]:
    return {"sum": batch["x2"].sum((1, 2)), "y": batch["y"]}


class TestTransforms:
    @pytest.mark.parametrize("batched", [False, True])
    def test_they_are_applied_when_read(self, ds: MappedDataset, batched: bool) -> None:
        """Rows, slices, gathers and loaders give what the functions make of them."""
        mapped = ds.map(double, batched=batched).map(total, batched=True)
        wanted = (columns()["x"] * 2).sum((1, 2))
        assert mapped[3]["sum"] == wanted[3]
        assert torch.equal(mapped[3:9]["sum"], wanted[3:9])
        assert torch.equal(mapped[[4, -1]]["sum"], wanted[[4, -1]])
        (batch,) = DataLoader(mapped, batch_size=N)
        assert torch.equal(batch["sum"], wanted)
        assert [float(row["sum"]) for row in mapped] == wanted.tolist()
        assert mapped[5:5].keys() == ({"sum", "y"} if batched else set())

    def test_rows_may_become_anything(self, ds: MappedDataset) -> None:
        """A function of rows may give strings; the loader collates them as torch does."""
        named = ds.map(lambda row: {"name": f"row {int(row['y'])}", "n": int(row["y"])})
        (batch,) = DataLoader(named.select(range(2)), batch_size=2)
        assert batch["name"] == ["row 0", "row 1"]
        assert batch["n"].tolist() == [0, 1]
        assert named[[0, 1]]["name"] == ["row 0", "row 1"]

    def test_they_travel(self, ds: MappedDataset) -> None:
        """An importable function is pickled with the dataset."""
        again = pickle.loads(pickle.dumps(ds.map(double)))
        assert torch.equal(again[1]["x2"], columns()["x"][1] * 2)


class TestLoaders:
    @pytest.mark.parametrize("context", [None, "fork", "spawn"])
    def test_all_rows_come_through_workers(self, ds: MappedDataset, context: str | None) -> None:
        """A DataLoader gives every row once, in this process or in forked or spawned workers."""
        loader = DataLoader(
            ds,
            batch_size=7,
            shuffle=True,
            num_workers=2 if context else 0,
            multiprocessing_context=context,
            timeout=90 if context else 0,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
            batches = list(loader)
        assert [len(b["y"]) for b in batches] == [7] * 5 + [5]
        assert sorted(torch.cat([b["y"] for b in batches]).tolist()) == list(range(N))
        for batch in batches:
            assert torch.equal(batch["x"], columns()["x"][batch["y"]])

    def test_a_batch_is_gathered_once(self, ds: MappedDataset) -> None:
        """torch's collate function gives the gathered tensors themselves."""
        rows: Any = ds.__getitems__([1, 2, 3])
        batch = torch.utils.data.default_collate(rows)
        assert batch["x"].data_ptr() == rows.batch["x"].data_ptr()

    def test_a_collate_function_gets_rows(self, ds: MappedDataset) -> None:
        """A function of the user's is given a sequence of dicts, as of any dataset."""

        def collate(rows: Any) -> list[int]:
            assert [r["y"] for r in rows[1:]] == [r["y"] for r in list(rows)[1:]]
            assert rows[-1]["y"] == rows[len(rows) - 1]["y"]
            return [int(row["y"]) for row in rows]

        assert list(DataLoader(ds, batch_size=20, collate_fn=collate)) == [
            list(range(20)),
            list(range(20, 40)),
        ]

    def test_samplers(self, ds: MappedDataset) -> None:
        """A batch sampler with batch_size=None indexes with whole lists."""
        sampler = BatchSampler(RandomSampler(ds), 8, drop_last=False)
        batches = list(DataLoader(ds, batch_size=None, sampler=sampler))
        assert sorted(torch.cat([b["y"] for b in batches]).tolist()) == list(range(N))

    def test_a_subset_of_torch(self, ds: MappedDataset) -> None:
        """torch's own Subset and random_split work on it."""
        part = torch.utils.data.Subset(ds, [3, 5])
        (batch,) = DataLoader(part, batch_size=2)
        assert batch["y"].tolist() == [3, 5]


class TestTravel:
    def test_its_size_does_not_grow(self, tmp_path: Path) -> None:
        """A dataset of 300,000 shuffled rows pickles into as many bytes as one of 40."""
        small = MappedDataset.from_tensors(tmp_path / "aaaaa", columns())
        large = MappedDataset.from_tensors(tmp_path / "bbbbb", columns(300_000))
        sizes = [len(pickle.dumps(d.shuffle(1).shard(0, 2))) for d in (small, large)]
        assert abs(sizes[0] - sizes[1]) < 64
        assert max(sizes) < 600

    def test_missing_and_replaced_files(self, tmp_path: Path, ds: MappedDataset) -> None:
        """What arrives is checked: never other rows than the sender's."""
        data = pickle.dumps(ds)
        path = tmp_path / "ds" / "y.memmap"
        content = path.read_bytes()
        os.unlink(path)
        with pytest.raises(PathNotFoundError):
            pickle.loads(data)
        with pytest.raises(PathNotFoundError):
            ds.check()
        path.write_bytes(content)
        with pytest.raises(StaleReferenceError):
            pickle.loads(data)

    def test_rows_that_were_written_to_are_not_sent(self, ds: MappedDataset) -> None:
        """Private writes have no file: the error says so, instead of sending the old bytes."""
        ds[0]["y"].fill_(7)
        with pytest.raises(NotSharedError, match="written to"):
            pickle.dumps(ds)


class TestSources:
    def test_files(self, tmp_path: Path) -> None:
        """Columns come from .npy and .safetensors files, by name or all of them."""
        np.save(tmp_path / "x.npy", columns()["x"].numpy())
        np.save(tmp_path / "f.npy", np.asfortranarray(columns()["x"].numpy()))
        safetensors.torch.save_file(columns(), tmp_path / "all.safetensors")
        ds = MappedDataset.from_files(
            tmp_path / "a",
            {"x": tmp_path / "x.npy", "f": tmp_path / "f.npy", "y": tmp_path / "all.safetensors"},
        )
        assert torch.equal(ds[:]["x"], columns()["x"])
        assert torch.equal(ds[:]["f"], columns()["x"])
        assert torch.equal(ds[:]["y"], columns()["y"])
        both = MappedDataset.from_files(tmp_path / "b", tmp_path / "all.safetensors")
        assert set(both.columns) == {"x", "y"}
        with pytest.raises(LayoutError, match="without a name"):
            MappedDataset.from_files(tmp_path / "c", tmp_path / "x.npy")
        with pytest.raises(LayoutError, match="no tensor 'z'"):
            MappedDataset.from_files(tmp_path / "c", {"z": tmp_path / "all.safetensors"})

    def test_files_where_they_are(self, tmp_path: Path) -> None:
        """Tensors of mmrpc.open are columns without a copy, and travel as references."""
        safetensors.torch.save_file(columns(), tmp_path / "all.safetensors")
        ds = MappedDataset.of(mmrpc.open(tmp_path / "all.safetensors"))
        again = pickle.loads(pickle.dumps(ds))
        assert torch.equal(again[7]["x"], columns()["x"][7])
        with pytest.raises(LayoutError, match="same number of rows"):
            MappedDataset.of({"a": torch.ones(1), "b": torch.ones(2)})
        with pytest.raises(NotSharedError):
            MappedDataset.of({"a": torch.ones(1)})

    def test_trees_and_tensordicts(self, tmp_path: Path) -> None:
        """What save_tree and tensordict write is a dataset, and a dataset is one of theirs."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensordict = pytest.importorskip("tensordict")
        mmrpc.save_tree(tmp_path / "t", columns(), batch_size=(N,))
        tensordict.TensorDict(columns(), [N]).memmap(tmp_path / "td")
        for name in ("t", "td"):
            assert torch.equal(MappedDataset(tmp_path / name)[:]["x"], columns()["x"])
        MappedDataset.from_tensors(tmp_path / "ds", columns())
        td = tensordict.TensorDict.load_memmap(tmp_path / "ds")
        assert td.batch_size == (N,)
        assert torch.equal(td["x"], columns()["x"])

    def test_progress(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """A progress bar counts rows on standard error, if asked."""
        MappedDataset.from_tensors(tmp_path / "a", columns(), progress=True)
        assert "40 rows" in capfd.readouterr().err
        MappedDataset.from_tensors(tmp_path / "b", columns())
        assert capfd.readouterr().err == ""

    def test_no_rows(self, tmp_path: Path) -> None:
        """A dataset without rows has columns, and a loader gives nothing."""
        ds = MappedDataset.from_tensors(tmp_path / "a", columns(0))
        assert len(ds) == 0
        assert ds[:]["x"].shape == (0, 2, 3)
        assert list(DataLoader(ds, batch_size=2)) == []
        assert len(pickle.loads(pickle.dumps(ds))) == 0

    def test_existing(self, tmp_path: Path, ds: MappedDataset) -> None:
        """A dataset is replaced only if asked; who mapped it keeps its rows."""
        with pytest.raises(PathExistsError, match="append=True"):
            MappedDataset.from_tensors(tmp_path / "ds", columns(3))
        new = MappedDataset.from_tensors(tmp_path / "ds", columns(3), existsok=True)
        assert (len(ds), len(new)) == (N, 3)
        assert ds[N - 1]["y"] == N - 1


class TestNames:
    def test_what_is_no_dataset_is_told_as_such(self, tmp_path: Path) -> None:
        """The error is about the directory that was asked for, not about a file in it."""
        (tmp_path / "file").touch()
        (tmp_path / "empty").mkdir()
        for name, reason in {
            "nowhere": "no dataset is there",
            "empty": "the directory holds no dataset",
            "file": "it is no directory",
        }.items():
            with pytest.raises(PathNotFoundError, match=reason) as caught:
                MappedDataset(tmp_path / name)
            assert caught.value.path == str(tmp_path / name)
            assert caught.value.hint

    def test_a_url_of_no_dataset_is_told_as_such(self, tmp_path: Path) -> None:
        """The error names the URL, its mount and the node."""
        mounts = MountTable([Mount("data", str(tmp_path))], node="a")
        before = set_resolver(ClusterResolver(mounts, proven={}))
        try:
            with pytest.raises(PathNotFoundError, match="no complete dataset is there") as caught:
                MappedDataset("mount://data/ds")
        finally:
            set_resolver(before)
        error = caught.value
        assert (error.path, error.mount, error.node) == ("mount://data/ds", "data", "a")

    def test_a_url_is_looked_up_in_the_mounts(self, tmp_path: Path, ds: MappedDataset) -> None:
        """A dataset may be named by its mount; each of its files is found there."""

        class Mounts(HostResolver):
            def local_copy(self, url: str) -> str:
                return str(tmp_path / url.removeprefix("mount://data/"))

        with pytest.raises(ConfigError, match="knows no mounts"):
            MappedDataset("mount://data/ds")
        before = set_resolver(Mounts())
        try:
            assert torch.equal(MappedDataset("mount://data/ds")["y"], ds["y"])
        finally:
            set_resolver(before)


class TestBadDirectories:
    def test_missing(self, tmp_path: Path) -> None:
        """No dataset is an error, and none is made."""
        with pytest.raises(PathNotFoundError):
            MappedDataset(tmp_path / "none")
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        ("tree", "match"),
        [
            ({"a": torch.ones(2), "b": torch.ones(3)}, r"\[2, 3\] rows"),
            ({"a": torch.tensor(1)}, "no rows"),
            ({"a": {"b": torch.ones(1)}}, "no tensors"),
        ],
    )
    def test_no_columns(self, tmp_path: Path, tree: dict[str, Any], match: str) -> None:
        """A tree that is no set of columns says why."""
        mmrpc.save_tree(tmp_path / "t", tree)
        with pytest.raises(LayoutError, match=match):
            MappedDataset(tmp_path / "t")

    def test_short(self, tmp_path: Path, ds: MappedDataset) -> None:
        """A column that lost rows is an error at opening, not a SIGBUS."""
        os.truncate(tmp_path / "ds" / "x.memmap", 100)
        with pytest.raises(FileTooShortError):
            MappedDataset(tmp_path / "ds")


@pytest.mark.parametrize("advice", ["random", "sequential", "willneed"])
def test_advice_changes_nothing(ds: MappedDataset, advice: str) -> None:
    """Hints are taken for any order and leave the rows as they are."""
    for dataset in (ds, ds.shuffle(), ds.select(range(0, N, 2))):
        dataset.advise(advice)
        dataset.prefetch()
        dataset.prefetch(slice(2, 5))
        dataset.prefetch([1, -1])
        dataset.prefetch(slice(3, 3))
    assert ds[:]["y"].tolist() == list(range(N))
