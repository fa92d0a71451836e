"""The receiver's side: tensors on slots of other processes, and when they are done."""

from __future__ import annotations

import ctypes
import os
import select
import threading
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from mmrpc.core import memory
from mmrpc.core.system import host
from mmrpc.errors import StaleReferenceError
from mmrpc.rpc.spool.control import Control

if TYPE_CHECKING:
    from mmrpc.core.mapping import Mapping
    from mmrpc.rpc.spool.slots import Ticket

_lock = threading.Lock()
_mapped: dict[tuple[int, int, int], Mapping] = {}
_held: WeakSet[_Hold] = WeakSet()
_watched: set[int] = set()


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
        mapping = _mapped.get(key)
        if mapping is None:
            _forget_ended()
            mapping = _mapped[key] = memory.attach(slot, ticket.layout.end_bytes)
            _watch(slot.pid)
    return mapping


def _forget_ended() -> None:
    """Drops slots that their sender gave up, or whose sender has ended."""
    for key, mapping in list(_mapped.items()):
        pid, started, _ = key
        if Control.from_address(mapping.address).retired or not host.is_alive(pid, started):
            del _mapped[key]


def _watch(pid: int) -> None:
    """Lets go of a sender's slots when it ends, also if nothing is received any more."""
    if pid in _watched:
        return
    try:
        process = os.pidfd_open(pid)
    except OSError:  # it has ended, or the kernel has no such call: the next message cleans up
        return
    _watched.add(pid)
    threading.Thread(
        target=_forget_after, args=(pid, process), name=f"mmrpc-spool-{pid}", daemon=True
    ).start()


def _forget_after(pid: int, process: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()
    os.close(process)
    with _lock:
        _watched.discard(pid)
        _forget_ended()


def forget() -> None:
    """Drops all slots that no tensor is on."""
    with _lock:
        _mapped.clear()


def _before_fork() -> None:
    # The child has the tensors too, and nobody knows when it is done: they are never released.
    with _lock:
        held = list(_held)
    for hold in held:
        hold.control = None


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _watched.clear()  # threads are not inherited


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
