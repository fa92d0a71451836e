"""Storages that somebody else mapped, as `torch.UntypedStorage.from_file` does.

Whether a storage really is a piece of the file that it names is read from the kernel's list of
mappings, not believed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from mmrpc.core import files
from mmrpc.core.identity import identify
from mmrpc.core.location import Mode
from mmrpc.core.mapping import FileMapping
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    import torch


class _Region(NamedTuple):
    """A line of ``/proc/self/maps``."""

    start: int
    is_shared: bool
    offset: int
    inode: int


def borrow(storage: torch.UntypedStorage, path: str) -> FileMapping:
    """Describes a storage that is mapped from a file; the storage goes on to own its bytes.

    Raises:
        LayoutError: If it is not mapped from that file.
        PathError: If the file cannot be read.
    """
    fd = files.open_regular(path)
    try:
        identity = identify(fd)
    finally:
        os.close(fd)
    address = storage.data_ptr()
    region = _region_at(address) if storage.nbytes() else _Region(0, True, 0, identity.inode)
    if region is None or region.inode != identity.inode:
        raise LayoutError(f"the storage is not mapped from {path!r}")
    return FileMapping(
        address,
        storage.nbytes(),
        mode=Mode.WRITE if region.is_shared else Mode.READ,
        path=path,
        identity=identity,
        owner=storage,
        start_bytes=region.offset + address - region.start,
    )


def _region_at(address: int) -> _Region | None:
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, flags, offset, _device, inode = line.split(maxsplit=5)[:5]
            start, end = (int(n, 16) for n in span.split("-"))
            if start <= address < end:
                return _Region(start, flags[3] == "s", int(offset, 16), int(inode))
    return None
