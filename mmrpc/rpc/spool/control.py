"""The words at the start of a slot, by which its two sides tell whose turn it is.

Each word is written by one side only, as one aligned store of 8 bytes, so no lock is needed
between the processes.
"""

from __future__ import annotations

import ctypes
from typing import Final

CONTROL_BYTES: Final = 4096
"""Bytes of a slot before its data: a page, so that the data starts on one."""


class Control(ctypes.Structure):
    """The control words of a slot.

    Attributes:
        sent: Number of the last message in the slot; the sender writes it.
        released: Number of the last message that the receiver is done with; it writes it.
        retired: 1 when the sender has given the slot up; the receiver unmaps it.
    """

    _fields_ = (
        ("sent", ctypes.c_uint64),
        ("released", ctypes.c_uint64),
        ("retired", ctypes.c_uint64),
    )
    sent: int
    released: int
    retired: int
