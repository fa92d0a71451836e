"""Which tensors go through slots, and the pool of this process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Final

import torch

from mmrpc.core.system import libc
from mmrpc.errors import ConfigError
from mmrpc.rpc import torchrpc
from mmrpc.rpc.spool import peers, received
from mmrpc.rpc.spool.slots import Pool, Ticket

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mmrpc.rpc.spool.peers import Address

DEFAULT_SHARE_ABOVE_BYTES: Final = 8 << 20
"""Below it TensorPipe is about as fast; see docs/performance.md."""

_VARIABLE: Final = "MMRPC_SHARE_ABOVE_BYTES"
"""Bytes, where no config says it; 0 for never."""

_QUOTA_PART: Final = 8  # of the machine's memory, for each process that sends

_lock = threading.Lock()
_pool: Pool | None = None
_share_above_bytes: int | None = None


def configure(share_above_bytes: int | None = None) -> None:
    """Says from which size on tensors go through shared memory.

    Args:
        share_above_bytes: The size in bytes; 0 for never; None for what the environment says.

    Raises:
        ConfigError: If the environment gives no number of bytes.
    """
    global _pool, _share_above_bytes
    close()
    if share_above_bytes is None:
        share_above_bytes = _wanted_bytes()
    if not share_above_bytes:
        return
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with _lock:
        _share_above_bytes = share_above_bytes
        _pool = Pool(memory_bytes // _QUOTA_PART)
        peers.start()


def _wanted_bytes() -> int:
    text = os.environ.get(_VARIABLE)
    if text is None:
        return DEFAULT_SHARE_ABOVE_BYTES
    if not text.isdecimal():
        raise ConfigError(
            f"{text!r} is not a number of bytes",
            key=_VARIABLE,
            hint="Give it without a unit; 0 turns it off.",
        )
    return int(text)


def close() -> None:
    """Gives all slots up, and forgets the peers; tensors that were received stay."""
    global _pool, _share_above_bytes
    with _lock:
        pool, _pool = _pool, None
        _share_above_bytes = None
    if pool is not None:
        pool.close()
    received.forget()
    peers.forget()


def offer(tensor: torch.Tensor, receiver: Address) -> Ticket | None:
    """Puts a tensor into a slot for a receiver of this host, or gives None: it goes as ever.

    That is so if it is small, in other than plain CPU memory, not contiguous, part of an
    autograd graph, if the receiver may not open this process's memory, or if there is no room.
    """
    pool, above = _pool, _share_above_bytes
    if pool is None or above is None or not _suits(tensor, above):
        return None
    # Since the receiver looked, this process may have closed its memory to others: prctl(2).
    if not (receiver.opens and libc.is_dumpable()) or torchrpc.in_autograd_context():
        return None
    return pool.put(tensor, receiver)


def withdraw(carried: Iterable[Any]) -> None:
    """Frees the slots of a message that will not be sent."""
    pool = _pool
    for item in carried:
        if type(item) is Ticket and pool is not None:
            pool.withdraw(item)


def _suits(tensor: torch.Tensor, above: int) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() * tensor.itemsize >= above
        and not tensor.requires_grad
        and not tensor.is_nested
        and not tensor.is_quantized
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    )


def take_all(carried: Iterable[Any]) -> list[Any]:
    """Gives the tensors for the tickets among what a message carried.

    Raises:
        PathError: If a slot cannot be opened; the others are free again then.
    """
    taken, error = [], None
    for item in carried:
        if type(item) is Ticket:
            try:
                item = received.take(item)
            except Exception as failure:
                error = failure
        taken.append(item)
    if error is not None:
        raise error
    return taken


def _in_child() -> None:
    """A child has no part in its parent's slots: it fills none, and gives none up."""
    global _lock, _pool, _share_above_bytes
    _lock = threading.Lock()
    _pool = _share_above_bytes = None


os.register_at_fork(after_in_child=_in_child)
