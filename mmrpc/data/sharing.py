"""A dataset for nodes of which some cannot open it: by reference, or row by row through RPC.

The second way copies every row through the network and is never taken by itself: the sender
asks for it with ``ds.share(fallback=True)``, and the receiver is told by a warning.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from mmrpc.data.batches import Rows
from mmrpc.errors import LayoutError, PathError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mmrpc.data.views import Views
    from mmrpc.rpc import RRef


class SharedDataset:
    """What to send for a dataset; a `MappedDataset` or `RemoteDataset` arrives.

    Args:
        dataset: The dataset, opened on this worker.
        fallback: Whether a node that cannot open it gets the rows through RPC.
    """

    def __init__(self, dataset: Views, *, fallback: bool) -> None:
        self.dataset = dataset
        self.fallback = fallback

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        opened, arguments = self.dataset.__reduce_ex__(protocol)
        if not self.fallback:
            return opened, arguments
        from mmrpc import rpc

        columns, length = self.dataset.columns, len(self.dataset)
        return _open_or_ask, (opened, arguments, rpc.RRef(self.dataset), columns, length)


def _open_or_ask(
    open_dataset: Callable[..., Any],
    arguments: tuple[Any, ...],
    owner: RRef[Any],
    columns: Any,
    length: int,
) -> Any:
    from mmrpc.core.standin import Unopened

    try:
        opened = open_dataset(*arguments)
        if not isinstance(opened, Unopened):
            return opened
        why = repr(opened)
    except PathError as error:
        why = str(error)
    warnings.warn(
        f"the rows of this dataset come through RPC from {owner.owner_name()}, since {why}",
        stacklevel=2,
    )
    return RemoteDataset(owner, columns, length)


class RemoteDataset(torch.utils.data.Dataset[Any]):
    """Rows of another worker's dataset, each batch one call to it.

    It has the indexing of `MappedDataset`; everything that it gives is a copy. It does not travel
    to processes outside the RPC group, so a `DataLoader` needs ``num_workers=0``.

    Args:
        owner: The dataset on the worker that has it.
        columns: Names of its columns.
        length: Number of its rows.
    """

    def __init__(self, owner: RRef[Any], columns: Sequence[str], length: int) -> None:
        self._owner = owner
        self.columns = tuple(columns)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        from mmrpc import rpc

        return rpc.rpc_sync(self._owner.owner_name(), _rows, (self._owner, index))

    def __getitems__(self, rows: Sequence[int]) -> Sequence[Any]:
        """The rows of a batch, with one call."""
        if not len(rows):
            raise LayoutError("a batch needs a row")
        return Rows(self[list(rows)], len(rows))

    def __repr__(self) -> str:
        return f"RemoteDataset({self._length:,} rows of {self._owner.owner_name()})"


def _rows(owner: RRef[Any], index: Any) -> Any:
    """Runs on the owner; gives copies, since the asking node cannot open the files."""
    return _copied(owner.local_value()[index])


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value
