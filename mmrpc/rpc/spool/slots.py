"""The sender's slots: memory that is filled, named in a message, and filled again."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from mmrpc.core.layout import Layout
from mmrpc.core.location import MemoryLocation
from mmrpc.core.memory import Arena
from mmrpc.core.storage import tensor_of
from mmrpc.core.system import host, libc
from mmrpc.core.system.meminfo import available_bytes
from mmrpc.errors import MmrpcError
from mmrpc.rpc.spool.control import CONTROL_BYTES, Control

if TYPE_CHECKING:
    import torch

    from mmrpc.rpc.spool.peers import Address

_WASTE: Final = 2  # a slot may be at most so many times larger than what is put into it
_STEPS: Final = 4  # sizes of slots between two powers of two


class Ticket(NamedTuple):
    """What travels for a tensor in a slot.

    Attributes:
        slot: Where the slot is.
        number: Which message in it is meant.
        layout: The tensor in it.
    """

    slot: MemoryLocation
    number: int
    layout: Layout


class Slot:
    """A piece of shared memory that one receiver at a time has.

    Attributes:
        nbytes: Bytes of data that fit.
        receiver: The process that has it, or had it last.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._arena = Arena(CONTROL_BYTES + nbytes)
        # Now, so that there is an error rather than a SIGBUS if there is no such memory.
        libc.fallocate(self._arena.fd, 0, CONTROL_BYTES + nbytes)
        self._control = Control.from_address(self._arena.address)
        self._location = MemoryLocation(
            host.memory_host_id(),
            os.getpid(),
            host.own_start_time(),
            self._arena.fd,
            self._arena.inode,
        )
        self.receiver: Address | None = None
        self._withdrawn = 0

    def is_free(self) -> bool:
        """Whether its receiver is done with it, has died, or was never told."""
        if self._control.sent in (self._control.released, self._withdrawn):
            return True
        return self.receiver is None or not host.is_alive(self.receiver.pid, self.receiver.started)

    def fill(self, tensor: torch.Tensor, receiver: Address) -> Ticket:
        """Copies a contiguous tensor into the slot, for a receiver."""
        layout = Layout.contiguous(tensor.dtype, tuple(tensor.shape), CONTROL_BYTES)
        number = self._control.sent + 1
        tensor_of(self._arena, layout).copy_(tensor)
        self.receiver = receiver
        self._control.sent = number
        return Ticket(self._location, number, layout)

    def withdraw(self, ticket: Ticket) -> None:
        """Frees the slot if that ticket, which was never sent, is of this slot."""
        if ticket.slot == self._location:
            self._withdrawn = ticket.number

    def retire(self) -> None:
        """Gives the memory up; a receiver that has it mapped unmaps it when it next receives."""
        self._control.retired = 1


class Pool:
    """The slots of this process.

    Args:
        quota_bytes: How much memory they may have; beyond it, tensors go by TensorPipe.
    """

    def __init__(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self._slots: list[Slot] = []  # the one used last comes last
        self._lock = threading.Lock()

    def put(self, tensor: torch.Tensor, receiver: Address) -> Ticket | None:
        """Copies a contiguous tensor into a slot; None if there is no room for it."""
        with self._lock:
            slot = self._take(tensor.numel() * tensor.itemsize)
            if slot is None:
                return None
            slot.receiver = receiver
        # Nobody else has it, so the copy needs no lock.
        ticket = slot.fill(tensor, receiver)
        with self._lock:
            self._slots.append(slot)
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Frees the slot of a ticket that will not be sent."""
        with self._lock:
            for slot in self._slots:
                slot.withdraw(ticket)

    def _take(self, nbytes: int) -> Slot | None:
        fitting = [
            slot
            for slot in self._slots
            if nbytes <= slot.nbytes <= nbytes * _WASTE and slot.is_free()
        ]
        if fitting:
            slot = min(reversed(fitting), key=lambda slot: slot.nbytes)
            self._slots.remove(slot)
            return slot
        size = _slot_size(nbytes)
        if not self._make_room(size):
            return None
        try:
            return Slot(size)
        except (OSError, MmrpcError):
            return None  # no memory for it: TensorPipe sends in small pieces

    def _make_room(self, nbytes: int) -> bool:
        free_bytes = available_bytes()
        if nbytes > self.quota_bytes or (free_bytes is not None and nbytes > free_bytes // 2):
            return False
        excess = sum(slot.nbytes for slot in self._slots) + nbytes - self.quota_bytes
        for slot in list(self._slots):
            if excess <= 0:
                break
            if slot.is_free():
                slot.retire()
                self._slots.remove(slot)
                excess -= slot.nbytes
        return excess <= 0

    def close(self) -> None:
        """Gives all slots up; tensors that receivers have stay theirs."""
        with self._lock:
            for slot in self._slots:
                slot.retire()
            self._slots.clear()


def _slot_size(nbytes: int) -> int:
    step = 1 << max((nbytes - 1).bit_length() - 1, 0) - min(nbytes.bit_length(), 2)
    step = max(step, CONTROL_BYTES)
    return -(-nbytes // step) * step
