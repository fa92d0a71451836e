"""Torch storages over mapped bytes, and the tensors on them.

The storage carries its mapping, and so does every view of it, whatever torch function made the
view: that is how a plain ``x.t()`` is still known to be a piece of a file.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from mmrpc.core.layout import Layout, alignment_bytes
from mmrpc.core.location import Mode
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    from mmrpc.core.mapping import Mapping


class MappedStorage(torch.UntypedStorage):
    """A storage whose bytes are mapped; it keeps its mapping alive.

    Torch keeps this class and its attributes as long as any tensor views the storage.
    """

    # Absent on what torch makes of the class itself: plain memory then.
    _mapping: Mapping | None = None
    _start_bytes: int = 0

    @property
    def filename(self) -> str | None:
        """Absolute path of the file, if writes to the storage reach it."""
        mapping = self._mapping
        if mapping is None or mapping.mode is not Mode.WRITE:
            return None
        return mapping.path

    def is_shared(self) -> bool:
        """Whether other processes can have the same bytes."""
        return True if self._mapping is not None else super().is_shared()

    def share_memory_(self, *args: Any, **kwargs: Any) -> MappedStorage:
        """Gives itself: it is shared already."""
        if self._mapping is None:
            super().share_memory_(*args, **kwargs)
        return self

    def clone(self) -> torch.UntypedStorage:
        """A copy in plain memory; `copy.deepcopy` of a plain view wants exactly that class."""
        return torch.UntypedStorage(self.nbytes()).copy_(self)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._mapping is None:
            return super().__reduce_ex__(protocol)
        from mmrpc.core import reference

        return reference.reduce_storage(self)


def storage_of(mapping: Mapping, start_bytes: int, nbytes: int) -> MappedStorage:
    """Makes a storage over a range of a mapping; nothing is copied.

    Args:
        mapping: What is mapped.
        start_bytes: Where the range starts in the file or memory.
        nbytes: Its length.
    """
    return _flat(mapping, start_bytes, nbytes, torch.uint8).untyped_storage()  # type: ignore[return-value]


def _flat(mapping: Mapping, start_bytes: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor on a mapped storage of its own."""
    if nbytes:
        buffer = (ctypes.c_char * nbytes).from_address(
            mapping.address + start_bytes - mapping.start_bytes
        )
        buffer.mapping = mapping  # type: ignore[attr-defined]  # lives as long as the storage
        flat = torch.frombuffer(buffer, dtype=dtype)
    else:
        # By way of DLPack, because torch may not resize such a storage either: it would go on in
        # memory of its own, and a reference would not say so.
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        flat = torch.from_dlpack(empty).view(dtype)  # type: ignore[attr-defined]
    storage = flat.untyped_storage()
    storage.__class__ = MappedStorage
    storage._mapping = mapping  # type: ignore[attr-defined]
    storage._start_bytes = start_bytes  # type: ignore[attr-defined]
    return flat


def tensor_of(mapping: Mapping, layout: Layout) -> torch.Tensor:
    """Makes a plain tensor on its own piece of a mapping; nothing is copied."""
    tensor = _flat(mapping, layout.offset_bytes, layout.span_bytes, layout.dtype)
    # In place, and so no view of the flat one: a root has no base.
    tensor.as_strided_(layout.shape, layout.strides)
    if layout.conj:
        tensor = torch.conj(tensor)
    if layout.neg:
        tensor = torch._neg_view(tensor)
    return tensor


def mapped_storage(tensor: torch.Tensor) -> MappedStorage | None:
    """The mapped storage that a tensor is on, or None."""
    if tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
    except RuntimeError:  # functorch wrappers and the like have none
        return None
    if isinstance(storage, MappedStorage) and storage._mapping is not None:
        return storage
    return None


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; keep the tensor alive meanwhile."""
    nbytes = tensor.numel() * tensor.itemsize
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def check_alignment(address: int, dtype: torch.dtype) -> None:
    """Refuses an address that does not suit a dtype."""
    if address % alignment_bytes(dtype):
        raise LayoutError(f"the storage is not aligned for {dtype}")
