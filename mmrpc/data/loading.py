"""Reading in batches, by rank, shuffled anew each epoch, from where the last run stopped."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Sampler

from mmrpc.data.ranks import rank_and_world_size
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized


class ShardSampler(Sampler[int]):
    """The rows of one rank, for the ``sampler`` of a `DataLoader`.

    Ranks take turns, so that they agree on the order without a word. Their numbers of rows differ
    by one at most, or with `drop_last` not at all.

    Args:
        dataset: The dataset, or anything with a length.
        rank: None for the rank of this RPC worker or process group.
        world_size: Likewise.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the shuffling; the same on all ranks.
        drop_last: Whether rows that not every rank would get are left out.

    Attributes:
        epoch: Which epoch's order is next; set it before each, the same on all ranks.
        rows: Rows of the dataset.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.rank, self.world_size = rank_and_world_size(rank, world_size)
        self.rows = len(dataset)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets `epoch`, as loaders and training libraries do."""
        self.epoch = epoch

    def order(self) -> torch.Tensor:
        """The rows of this rank in this epoch, as a 1-D int64 tensor."""
        rows = self.rows - self.rows % self.world_size if self.drop_last else self.rows
        if self.shuffle:
            generator = torch.Generator().manual_seed(_mixed(self.seed, self.epoch))
            order = torch.randperm(self.rows, generator=generator)[:rows]
        else:
            order = torch.arange(rows)
        return order[self.rank :: self.world_size]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

    def __len__(self) -> int:
        if self.drop_last:
            return self.rows // self.world_size
        return len(range(self.rank, self.rows, self.world_size))


def _mixed(seed: int, epoch: int) -> int:
    """One seed from two numbers: a sum would give seed 1 in epoch 0 the order of 0 in 1.

    It has 32 bits, since torch's generator for the CPU looks at no more.
    """
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


class ResumableLoader:
    """Batches of a dataset, with a state from which another process goes on at the next batch.

    Iterating gives the rest of the epoch; then the next epoch is on. What counts is what the
    caller was given, whatever workers have read ahead.

    Args:
        dataset: A `MappedDataset`, or another with ``ds[list]``.
        batch_size: Rows in a batch of this rank.
        rank: None for the rank of this RPC worker or process group, if one runs, else 0 of 1.
        world_size: Likewise.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the shuffling; the same on all ranks.
        drop_last: Whether all ranks get the same number of full batches, and the rest is left out.
        **options: For `torch.utils.data.DataLoader`: ``num_workers``, ``multiprocessing_context``,
            ``prefetch_factor``, ``pin_memory``, ...

    Attributes:
        sampler: Which rows come, and in which order.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if batch_size < 1:
            raise LayoutError(f"a batch of {batch_size} rows cannot be")
        self.dataset = dataset
        self.batch_size = batch_size
        rank, world_size = _or_alone(rank, world_size)
        self.sampler = ShardSampler(
            dataset,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self._options = options
        self._given = 0

    def __len__(self) -> int:
        rows = len(self.sampler)
        return rows // self.batch_size if self.sampler.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = self.sampler.order()
        batches = torch.split(order, self.batch_size)[self._given : len(self)]
        # A whole list of rows for each item: the dataset gathers it, nothing has to collate.
        loader = DataLoader(
            self.dataset, batch_size=None, sampler=[b.tolist() for b in batches], **self._options
        )
        for batch in loader:
            self._given += 1
            yield batch
        self.sampler.epoch += 1
        self._given = 0

    def state_dict(self) -> dict[str, int]:
        """Where it is, as plain numbers."""
        sampler = self.sampler
        return {
            "epoch": sampler.epoch,
            "batches": self._given,
            "seed": sampler.seed,
            "batch_size": self.batch_size,
            "rows": sampler.rows,
            "world_size": sampler.world_size,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from where another was.

        Raises:
            LayoutError: If the other had other batches, so that the position means nothing here.
        """
        mine = self.state_dict()
        fixed = ("seed", "batch_size", "rows", "world_size")
        other = [f"{k}={state.get(k)} (here {mine[k]})" for k in fixed if state.get(k) != mine[k]]
        if other:
            raise LayoutError(f"the state is of a loader with {', '.join(other)}")
        if not 0 <= state.get("batches", -1) <= len(self) or state.get("epoch", -1) < 0:
            raise LayoutError(f"the state is of no loader: {state}")
        self.sampler.epoch, self._given = state["epoch"], state["batches"]


def _or_alone(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is not None or world_size is not None:
        return rank_and_world_size(rank, world_size)
    try:
        return rank_and_world_size(None, None)
    except LayoutError:
        return 0, 1
