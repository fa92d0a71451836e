"""The receiver's side: tensors on slots of other processes, and when they are done."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from mmrpc.core import memory
from mmrpc.core.resolver import get_resolver
from mmrpc.errors import StaleReferenceError
from mmrpc.rpc.spool.control import Control
from mmrpc.rpc.spool.sweeper import IDLE_S, Sweeper

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmrpc.core.mapping import Mapping
    from mmrpc.rpc.spool.slots import Ticket

_lock = threading.Lock()
_mapped: dict[tuple[int, int, int], _Mapped] = {}
_held: WeakSet[_Hold] = WeakSet()


class _Mapped:
    """A slot that is kept mapped for the next message in it."""

    __slots__ = ("mapping", "used_s")

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.used_s = 0.0


class _Hold:
    """Keeps a slot for a tensor; with the tensor's end the slot is the sender's again."""

    __slots__ = ("__weakref__", "control", "mapping", "number")

    def __init__(self, mapping: Mapping, number: int) -> None:
        self.mapping = mapping
        self.control: Control | None = Control.from_address(mapping.address)
        self.number = number

    def __del__(self) -> None:
        if self.control is not None:
            self.control.released = self.number


def take(ticket: Ticket) -> torch.Tensor:
    """Gives the tensor in a slot; it is this process's own while it lives.

    Raises:
        StaleReferenceError: If the sender has ended, or no longer waits for us.
    """
    mapping = _map(ticket)
    control = Control.from_address(mapping.address)
    if control.sent != ticket.number or control.released == ticket.number:
        raise StaleReferenceError(
            "its sender has used the memory for another tensor",
            path=mapping.describe(),
            node=get_resolver().node,
            hint="The message came after its time: send the tensor again.",
        )
    hold = _Hold(mapping, ticket.number)
    with _lock:
        _held.add(hold)
    layout = ticket.layout
    # Not a mapped storage: this tensor is passed on by its value, not as a piece of the slot.
    buffer = (ctypes.c_char * layout.span_bytes).from_address(mapping.address + layout.offset_bytes)
    buffer.hold = hold  # type: ignore[attr-defined]  # lives as long as the storage
    tensor = torch.frombuffer(buffer, dtype=layout.dtype)
    tensor.set_(tensor.untyped_storage(), 0, layout.shape, layout.strides)
    return tensor


def _map(ticket: Ticket) -> Mapping:
    slot = ticket.slot
    key = (slot.pid, slot.started, slot.inode)
    with _lock:
        found = _mapped.get(key)
        if found is None:
            _drop(lambda kept: bool(Control.from_address(kept.mapping.address).retired))
            node = get_resolver().node
            attached = memory.attach(slot, ticket.layout.end_bytes, node=node)
            found = _mapped[key] = _Mapped(attached)
        found.used_s = time.monotonic()
        mapping = found.mapping
    _sweeper.arm()
    return mapping


def _sweep() -> bool:
    """Lets go of slots in which nothing came for a while; tensors on them keep the memory.

    So the memory of a sender that has ended, or gave its slots up, goes also if nothing is
    received any more.
    """
    before_s = time.monotonic() - IDLE_S
    with _lock:
        _drop(lambda kept: kept.used_s <= before_s)
        return bool(_mapped)


def _drop(is_over: Callable[[_Mapped], bool]) -> None:
    for key, kept in list(_mapped.items()):
        if is_over(kept):
            del _mapped[key]


_sweeper = Sweeper(_sweep)


def forget() -> None:
    """Drops all slots that no tensor is on."""
    _sweeper.disarm()
    with _lock:
        _mapped.clear()


def _before_fork() -> None:
    # The child has the tensors too, and nobody knows when it is done: they are never released.
    with _lock:
        held = list(_held)
    for hold in held:
        hold.control = None


def _in_child() -> None:
    global _lock, _sweeper
    _lock = threading.Lock()
    _sweeper = Sweeper(_sweep)  # threads are not inherited


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
