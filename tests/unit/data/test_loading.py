"""Sharding by rank, and going on where another process stopped."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from mmrpc.data import MappedDataset, ResumableLoader, ShardSampler
from mmrpc.errors import LayoutError


@pytest.fixture
def ds(tmp_path: Path) -> MappedDataset:
    return MappedDataset.from_tensors(tmp_path / "ds", {"y": torch.arange(50)})


def rows(batches: Any) -> list[int]:
    return [int(y) for batch in batches for y in batch["y"]]


class TestShardSampler:
    @given(
        n=st.integers(0, 60),
        world_size=st.integers(1, 7),
        shuffle=st.booleans(),
        drop_last=st.booleans(),
        epoch=st.integers(0, 5),
    )
    def test_ranks_share_the_rows(
        self, n: int, world_size: int, shuffle: bool, drop_last: bool, epoch: int
    ) -> None:
        """No row goes to two ranks; all rows go to one, but for the rest if it is dropped."""
        parts = []
        for rank in range(world_size):
            sampler = ShardSampler(
                range(n),
                rank=rank,
                world_size=world_size,
                shuffle=shuffle,
                seed=3,
                drop_last=drop_last,
            )
            sampler.set_epoch(epoch)
            parts.append(list(sampler))
            assert len(parts[-1]) == len(sampler)
        counts = Counter(row for part in parts for row in part)
        assert set(counts.values()) <= {1}
        assert len(counts) == (n - n % world_size if drop_last else n)
        assert max(map(len, parts)) - min(map(len, parts)) <= (0 if drop_last else 1)

    def test_epochs_and_seeds_differ(self) -> None:
        """Each epoch and each seed has its order; the same ones have the same."""

        def order(seed: int, epoch: int) -> list[int]:
            sampler = ShardSampler(range(50), rank=0, world_size=1, shuffle=True, seed=seed)
            sampler.set_epoch(epoch)
            return list(sampler)

        assert order(0, 0) == order(0, 0)
        assert len({tuple(order(s, e)) for s in (0, 1) for e in (0, 1)}) == 4

    def test_in_a_data_loader(self, ds: MappedDataset) -> None:
        """It is a sampler of torch's loader."""
        sampler = ShardSampler(ds, rank=1, world_size=2)
        assert rows(DataLoader(ds, batch_size=4, sampler=sampler)) == list(range(1, 50, 2))


class TestResumableLoader:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("stop", [0, 1, 4, 7])
    def test_it_goes_on(self, ds: MappedDataset, stop: int, workers: int) -> None:
        """Stopped after any batch, a new loader gives the rest of the epoch, and the next one."""
        options: dict[str, Any] = {"shuffle": True, "seed": 9, "rank": 0, "world_size": 1}
        whole = ResumableLoader(ds, 8, **options)
        wanted = rows(whole) + rows(whole)
        if workers:
            options |= {"num_workers": workers, "multiprocessing_context": "forkserver"}
        first = ResumableLoader(ds, 8, **options)
        given_rows = []
        batches = iter(first)
        for _ in range(stop):
            given_rows += rows([next(batches)])
        state = json.loads(json.dumps(first.state_dict()))
        second = ResumableLoader(ds, 8, **options)
        second.load_state_dict(state)
        assert given_rows + rows(second) + rows(second) == wanted

    def test_batches(self, ds: MappedDataset) -> None:
        """Its length is the number of batches, with or without the last short one."""
        for drop_last, sizes in ((False, [8] * 6 + [2]), (True, [8] * 6)):
            loader = ResumableLoader(ds, 8, rank=0, world_size=1, drop_last=drop_last)
            assert [len(batch["y"]) for batch in loader] == sizes
            assert len(loader) == len(sizes)

    def test_alone_without_a_group(self, ds: MappedDataset) -> None:
        """Without RPC and process group it reads all rows."""
        assert rows(ResumableLoader(ds, 8)) == list(range(50))

    @pytest.mark.parametrize(
        "change", [{"seed": 1}, {"batch_size": 4}, {"rows": 3}, {"world_size": 2}, {"batches": 99}]
    )
    def test_a_state_of_another_loader(self, ds: MappedDataset, change: dict[str, int]) -> None:
        """A position among other batches means nothing, and is refused."""
        loader = ResumableLoader(ds, 8, rank=0, world_size=1)
        with pytest.raises(LayoutError, match="state is of"):
            loader.load_state_dict(loader.state_dict() | change)
        for missing in loader.state_dict():
            with pytest.raises(LayoutError, match="state is of"):
                loader.load_state_dict(
                    {key: n for key, n in loader.state_dict().items() if key != missing}
                )
        with pytest.raises(LayoutError, match="batch of 0"):
            ResumableLoader(ds, 0)
