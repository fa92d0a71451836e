"""References in calls that go through `torch.distributed.rpc` itself.

A `MemoryMappedTensor` pickles as a reference everywhere. A plain tensor on mapped storage, such
as a view that torch made, is of the class that torch's RPC copies; the reducer here sends it
as a reference as well. torch's built-in operators and TorchScript functions take no pickle:
their tensors are copied.
"""

from __future__ import annotations

from functools import partial

import torch

from mmrpc.rpc import torchrpc
from mmrpc.rpc.wire import reduce_plain


def register() -> bool:
    """Registers the reducer; again is harmless.

    Returns:
        Whether this version of torch has the private hook that it takes.
    """
    pickler = torchrpc.pickler()
    to_table = getattr(pickler, "_tensor_reducer", None)
    add = getattr(pickler, "_register_reducer", None)
    if to_table is None or add is None:
        return False

    add(torch.Tensor, partial(reduce_plain, to_table))
    return True
