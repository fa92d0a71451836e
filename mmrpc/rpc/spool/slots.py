"""The sender's slots: memory that is filled, named in a message, and filled again."""

from __future__ import annotations

import os
import resource
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from mmrpc.core.layout import Layout
from mmrpc.core.lease import LEASE_S
from mmrpc.core.location import MemoryLocation
from mmrpc.core.memory import Arena
from mmrpc.core.storage import tensor_of
from mmrpc.core.system import host, libc
from mmrpc.core.system.meminfo import available_bytes
from mmrpc.errors import MmrpcError
from mmrpc.rpc.spool.control import CONTROL_BYTES, Control
from mmrpc.rpc.spool.sweeper import Sweeper

if TYPE_CHECKING:
    import torch

    from mmrpc.rpc.spool.peers import Address

_WASTE: Final = 2  # a slot may be at most so many times larger than what is put into it
_STEPS: Final = 4  # sizes of slots between two powers of two
_DESCRIPTORS_PART: Final = 8  # of those that the process may have, since each slot keeps one


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
        filled_s: `time.monotonic()` when it was filled last.
        was_idle: Whether it was free at the last sweep, and has not been filled since.
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
        self.filled_s = 0.0
        self.was_idle = False
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
        self.filled_s = time.monotonic()
        self.was_idle = False
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

    A slot that nothing was put into for a while is given back. So is one that its receiver has
    not freed after the time that exported memory waits for receivers: by then it has the slot
    mapped and keeps the memory itself, or the message was dropped, as a reply is whose caller
    has given up.

    Args:
        quota_bytes: How much memory they may have; beyond it, tensors go by TensorPipe.
    """

    def __init__(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.sweeper = Sweeper(self.sweep)
        self._slots: list[Slot] = []  # the one used last comes last
        self._filling: list[int] = []  # sizes of those that are being filled
        self._most_slots = _descriptors() // _DESCRIPTORS_PART
        self._is_closed = False
        self._lock = threading.Lock()

    def put(self, tensor: torch.Tensor, receiver: Address) -> Ticket | None:
        """Copies a contiguous tensor into a slot; None if there is no room for it."""
        nbytes = tensor.numel() * tensor.itemsize
        with self._lock:
            slot = self._take(nbytes)
            size = _slot_size(nbytes) if slot is None else slot.nbytes
            if slot is None and not self._make_room(size):
                return None
            self._filling.append(size)
        ticket = None
        try:
            # Nobody else has it, so neither the memory nor the copy needs the lock.
            if slot is None:
                slot = _new_slot(size)
            if slot is not None:
                ticket = slot.fill(tensor, receiver)
        finally:
            with self._lock:
                self._filling.remove(size)
                if slot is not None and ticket is not None and not self._is_closed:
                    self._slots.append(slot)
                    self.sweeper.arm()
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
        if not fitting:
            return None
        slot = min(reversed(fitting), key=lambda slot: slot.nbytes)
        self._slots.remove(slot)
        return slot

    def _make_room(self, nbytes: int) -> bool:
        free_bytes = available_bytes()
        filling_bytes = sum(self._filling)
        if free_bytes is not None and nbytes > (free_bytes - filling_bytes) // 2:
            return False
        if filling_bytes + nbytes > self.quota_bytes:
            return False
        excess_bytes = sum(slot.nbytes for slot in self._slots) + filling_bytes + nbytes
        excess_bytes -= self.quota_bytes
        excess_slots = len(self._slots) + len(self._filling) + 1 - self._most_slots
        for slot in list(self._slots):
            if excess_bytes <= 0 and excess_slots <= 0:
                break
            if slot.is_free():
                self._give_back(slot)
                excess_bytes -= slot.nbytes
                excess_slots -= 1
        return excess_bytes <= 0 and excess_slots <= 0

    def sweep(self) -> bool:
        """Gives back what is not used, and tells whether any slot is left."""
        now_s = time.monotonic()
        with self._lock:
            for slot in list(self._slots):
                is_idle = slot.is_free()
                if (is_idle and slot.was_idle) or now_s - slot.filled_s > LEASE_S:
                    self._give_back(slot)
                slot.was_idle = is_idle
            return bool(self._slots)

    def _give_back(self, slot: Slot) -> None:
        slot.retire()
        self._slots.remove(slot)

    def close(self) -> None:
        """Gives all slots up; tensors that receivers have stay theirs."""
        self.sweeper.disarm()
        with self._lock:
            self._is_closed = True
            for slot in self._slots:
                slot.retire()
            self._slots.clear()


def _new_slot(nbytes: int) -> Slot | None:
    try:
        return Slot(nbytes)
    except (OSError, MmrpcError):
        return None  # no memory for it: TensorPipe sends in small pieces


def _descriptors() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if most != resource.RLIM_INFINITY else 1 << 20


def _slot_size(nbytes: int) -> int:
    step = 1 << max((nbytes - 1).bit_length() - 1, 0) - min(nbytes.bit_length(), 2)
    step = max(step, CONTROL_BYTES)
    return -(-nbytes // step) * step
