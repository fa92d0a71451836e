"""Existing tensors, storages and indices as `MemoryMappedTensor` meets them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from mmrpc.core import borrowed, creation
from mmrpc.core.layout import Layout, parse_size
from mmrpc.core.location import Mode
from mmrpc.core.mapping import FileMapping
from mmrpc.core.nested import NestedLayout
from mmrpc.core.storage import MappedStorage, mapped_storage, storage_of
from mmrpc.errors import LayoutError, MmrpcError

if TYPE_CHECKING:
    from mmrpc.core.creation import Filename


def size_of(shape: Any) -> tuple[int, ...] | torch.Tensor:
    """Reads the ``shape`` of existing data: a sequence, or a 2-D tensor for nested ones."""
    return parse_size((), shape) if shape is not None else parse_size(())


def alias(source: torch.Tensor) -> torch.Tensor:
    """A fresh tensor on the memory of another, to be given the class.

    Raises:
        LayoutError: If it requires gradients, or is on another device.
    """
    checked = creation.check_source(source)
    if checked is not source:
        raise LayoutError(
            f"a tensor on {source.device} cannot be wrapped", hint="Pass filename= to copy it."
        )
    return source.detach()


def file_of(tensor: torch.Tensor) -> FileMapping | None:
    """The mapped file that a tensor is in, or None."""
    storage = mapped_storage(tensor)
    mapping = None if storage is None else storage._mapping
    return mapping if isinstance(mapping, FileMapping) else None


def is_where_asked(tensor: torch.Tensor, filename: Filename | None, shape: Any) -> bool:
    """Whether `from_tensor` need not copy: the data is where it is asked to be."""
    if shape is not None and (tensor.is_nested or tuple(shape) != tuple(tensor.shape)):
        return False
    file = file_of(tensor)
    if filename is None or file is None:
        return filename is None and file is None
    return file.mode is Mode.WRITE and _has_name(file, filename)


def _has_name(file: FileMapping, filename: Filename) -> bool:
    try:
        return file.is_named(os.stat(creation.absolute_path(filename)))
    except OSError:
        return False


def check_copy_allowed(
    tensor: torch.Tensor, filename: Filename | None, copy_existing: bool
) -> None:
    """Refuses to copy from file to file by mistake.

    Raises:
        MmrpcError: If the tensor is in another file and `copy_existing` is false.
    """
    file = file_of(tensor)
    if filename is None or file is None or copy_existing or _has_name(file, filename):
        return
    raise MmrpcError(
        f"the data is in {file.path!r} already, and would be twice on disk",
        hint="Pass copy_existing=True to copy it, or use the file that it has.",
    )


def from_storage(
    storage: torch.UntypedStorage | torch.TypedStorage,
    shape: Any,
    dtype: torch.dtype | None,
    filename: Filename | None,
) -> torch.Tensor:
    """A plain tensor on an existing storage, which is known to be mapped if it is.

    Raises:
        LayoutError: If the storage has another file, the dtype is unclear, or the shape does
            not fit.
    """
    if isinstance(storage, torch.TypedStorage):
        dtype = _dtype_of_typed(storage, dtype)
        storage = storage._untyped_storage
    if not isinstance(storage, torch.UntypedStorage):
        raise TypeError(f"a storage is needed, not {type(storage).__name__}")
    if storage.device.type != "cpu":
        raise LayoutError(f"the storage is on {storage.device}, not on the CPU")
    storage = _with_mapping(storage, filename)
    layout = _layout_in(storage, shape, torch.int64 if dtype is None else dtype)
    if isinstance(layout, NestedLayout):
        return _nested(storage, layout)
    tensor = torch.empty(0, dtype=layout.dtype, device="cpu")
    return tensor.set_(storage, 0, layout.shape, layout.strides)


def _dtype_of_typed(storage: torch.TypedStorage, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    if storage.dtype != torch.get_default_dtype():
        raise LayoutError(
            f"the storage's dtype {storage.dtype} is not the default one",
            hint="Say how to read it with dtype=.",
        )
    return storage.dtype


def _with_mapping(storage: torch.UntypedStorage, filename: Filename | None) -> torch.UntypedStorage:
    path = None if filename is None else creation.absolute_path(filename)
    if isinstance(storage, MappedStorage) and storage._mapping is not None:
        own = storage._mapping.path
        if path is not None and own != path:
            raise LayoutError(f"the storage is in {own or 'anonymous memory'!r}, not in {path!r}")
        return storage
    recorded = storage.filename
    if recorded is not None:
        recorded = creation.absolute_path(recorded)
        if path is not None and path != recorded:
            raise LayoutError(f"the storage is in {recorded!r}, not in {path!r}")
    path = recorded or path
    if path is None:
        return storage
    mapping = borrowed.borrow(storage, path)
    return storage_of(mapping, mapping.start_bytes, mapping.nbytes)


def _layout_in(
    storage: torch.UntypedStorage, shape: Any, dtype: torch.dtype
) -> Layout | NestedLayout:
    nbytes = storage.nbytes()
    if shape is None:
        if nbytes % dtype.itemsize:
            raise LayoutError(
                f"a storage of {nbytes:,} bytes does not hold a whole number of {dtype}"
            )
        shape = (nbytes // dtype.itemsize,)
    layout = creation.layout_for(dtype, size_of(shape))
    if layout.end_bytes > nbytes:
        raise LayoutError(
            f"the shape needs {layout.end_bytes:,} bytes and the storage has {nbytes:,}"
        )
    return layout


def _nested(storage: torch.UntypedStorage, layout: NestedLayout) -> torch.Tensor:
    count = layout.span_bytes // layout.dtype.itemsize
    buffer = torch.empty(0, dtype=layout.dtype, device="cpu")
    buffer = buffer.set_(storage, 0, (count,), (1,))
    return layout.view_of(buffer)


def gather(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """The rows of a contiguous tensor that a 1-D index gives, or None where indexing has to.

    For whole rows `index_select` is up to 20 times faster than indexing; it takes no negative
    indices.
    """
    if (
        rows.dtype is not torch.int64
        or rows.dim() != 1
        or tensor.dim() == 0
        or not tensor.is_contiguous()
    ):
        return None
    try:
        return tensor.index_select(0, rows)
    except (IndexError, RuntimeError):  # indexing wraps negative ones, or says what is wrong
        return None


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory, where torch keeps no record of views."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def refuse_dims(index: Any) -> None:
    """Refuses functorch's first-class dimensions in an index.

    Raises:
        LayoutError: A ValueError too; if there is one.
    """
    dim = sys.modules["functorch.dim"].Dim
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, dim) for part in parts):
        raise LayoutError(
            "Using first class dimension indices with MemoryMappedTensor isn't supported at the "
            "moment."
        )
