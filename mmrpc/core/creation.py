"""New tensors: their bytes in a new file, complete or absent, or in anonymous memory."""

from __future__ import annotations

import operator
import os
import re
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from mmrpc.core import files, mapping, memory, resolver
from mmrpc.core.identity import identify
from mmrpc.core.layout import Layout, check_nested_sizes, dtype_name
from mmrpc.core.location import FileIdentity, Mode
from mmrpc.core.nested import NestedLayout, nested_tensor_of
from mmrpc.core.storage import byte_view, tensor_of
from mmrpc.errors import LayoutError, PathNotFoundError, UnsupportedTensorError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mmrpc.core.mapping import Mapping

AnyLayout = Layout | NestedLayout
Filename = str | os.PathLike[str]

_PIECE_BYTES: Final = 64 << 20  # of a source that must be rearranged: never more in memory at once
_FILL_BYTES: Final = 8 << 20
_UNKNOWN: Final = FileIdentity(0, 0, b"")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Whether it names a scheme, as ``mount://data/x.npy`` does."""
    return "://" in path and _SCHEME.match(path) is not None


def absolute_path(filename: Filename, *, writing: bool = False) -> str:
    """The absolute path of a name; symbolic links in it are kept.

    Args:
        filename: A path, or the URL of a place in a mount that is a directory of this node.
        writing: Whether something is to be made there: a mount can be for reading only.

    Raises:
        TypeError: If it is no path.
        PathNotFoundError: If it is empty.
        ConfigError: If it is a URL, and this process knows no such mount.
        PathError: If it is a URL of what is not here, or may not be made here.
    """
    path = os.fsdecode(filename)
    if not path.startswith("/"):
        if not path:
            raise PathNotFoundError("the file name is empty", path=path)
        if is_url(path):
            return resolver.get_resolver().local_path(path, writing=writing)
        path = os.path.join(os.getcwd(), path)
    # `a/../b` is not `b` if `a` is a link; all else is only spelling.
    return path if ".." in path.split("/") else os.path.normpath(path)


def layout_for(
    dtype: torch.dtype, size: tuple[int, ...] | torch.Tensor, offset_bytes: int = 0
) -> AnyLayout:
    """The layout of a contiguous tensor, checked; a 2-D tensor of sizes gives a nested one."""
    if isinstance(size, torch.Tensor):
        return NestedLayout.contiguous(dtype, size, offset_bytes)
    return Layout.contiguous(dtype, size, offset_bytes)


def view(mapping: Mapping, layout: AnyLayout) -> torch.Tensor:
    """A plain tensor, nested or not, on a mapping."""
    if isinstance(layout, NestedLayout):
        return nested_tensor_of(mapping, layout)
    return tensor_of(mapping, layout)


def new(
    layout: AnyLayout,
    pieces: Iterable[memoryview] | None,
    *,
    filename: Filename | None,
    existsok: bool,
    durable: bool = False,
) -> torch.Tensor:
    """Makes a new tensor.

    Args:
        layout: Its layout, contiguous and at offset 0.
        pieces: Its bytes, in order; None for zeros, which cost no writing.
        filename: Its file; None for anonymous memory.
        existsok: Whether a file of that name is replaced.
        durable: Whether the file is on the device when this returns.

    Raises:
        NoSpaceError: If its space cannot be reserved; nothing is left behind.
        PathError: If the file cannot be made.
    """
    nbytes = layout.span_bytes
    if filename is None:
        piece = memory.allocate(nbytes, pieces)
        return view(piece, layout.moved(piece.start_bytes))
    path = absolute_path(filename, writing=True)
    with files.new_file(path, replace=existsok) as file:
        if pieces is None:
            files.reserve(file.fd, nbytes, path)
        else:
            files.write(file.fd, pieces, nbytes, path)
        mapped = mapping.map_descriptor(file.fd, nbytes, Mode.WRITE, path, _UNKNOWN)
        file.publish(durable=durable)
        mapped.identity = identify(file.fd)
    return view(mapping.adopt(mapped), layout)


def filled(layout: AnyLayout, value: Any) -> Iterator[memoryview]:
    """The bytes of a tensor whose elements all have one value."""
    itemsize = layout.dtype.itemsize
    count = layout.span_bytes // itemsize
    block_count = min(count, _FILL_BYTES // itemsize)
    block = torch.full((block_count,), value, dtype=layout.dtype, device="cpu")
    data = byte_view(block)
    for start in range(0, count, max(block_count, 1)):
        yield data[: min(block_count, count - start) * itemsize]


def check_source(source: Any) -> torch.Tensor:
    """Gives the CPU tensor whose values a new one takes.

    Raises:
        TypeError: If it is no tensor.
        LayoutError: If it requires gradients, or raw bytes cannot hold it.
    """
    if not isinstance(source, torch.Tensor):
        raise TypeError(
            f"a torch.Tensor is needed, not {type(source).__name__}: use torch.as_tensor(x)"
        )
    if source.requires_grad:
        raise LayoutError(
            "a tensor that requires gradients cannot be mapped", hint="Pass x.detach()."
        )
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(source, distributed.DTensor):
        source = source.full_tensor()
    if source.layout is not torch.strided or source.is_quantized or source.is_meta:
        kind = "meta" if source.is_meta else str(source.layout).removeprefix("torch.")
        raise UnsupportedTensorError(
            f"a {'quantized' if source.is_quantized else kind} tensor cannot be mapped",
            hint="Only strided tensors with values can: convert it first.",
        )
    dtype_name(source.dtype)
    cpu: torch.Tensor = source.cpu()
    return cpu


def layout_of_copy(source: torch.Tensor, shape: Any) -> tuple[AnyLayout, list[torch.Tensor]]:
    """The contiguous layout of a copy, and the dense tensors that hold its values in order.

    Args:
        source: The tensor to copy.
        shape: The shape of the copy, to which the source is broadcast; None to keep its own.

    Raises:
        LayoutError: If it cannot be broadcast to that.
    """
    if isinstance(shape, torch.Tensor) and shape.ndim == 2:
        sizes: torch.Tensor | None = check_nested_sizes(shape)
    elif shape is None and source.is_nested:
        sizes = source._nested_tensor_size()
    else:
        sizes = None
    if sizes is None:
        target = tuple(source.shape if shape is None else map(operator.index, shape))
        return Layout.contiguous(source.dtype, target), [_broadcast(source, target)]
    layout = NestedLayout.contiguous(source.dtype, sizes)
    components = source.unbind(0)
    if len(components) != len(layout.sizes):
        raise LayoutError(
            f"{len(components)} components cannot take the {len(layout.sizes)} shapes given"
        )
    pairs = zip(components, layout.sizes, strict=True)
    return layout, [_broadcast(component, row) for component, row in pairs]


def _broadcast(source: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(source.shape) == shape:
        return source
    try:
        return source.expand(shape)
    except RuntimeError as error:
        raise LayoutError(
            f"a tensor of shape {tuple(source.shape)} cannot be broadcast to {shape}: {error}"
        ) from None


def pieces_of(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of dense tensors, each in row-major order, without a whole copy of any."""
    for tensor in tensors:
        yield from _pieces(tensor.detach())


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.itemsize == 1 and not lazy:
        tensor = tensor.view(torch.uint8)  # of some dtypes torch can copy the bytes only
    if tensor.is_contiguous() and not lazy:
        yield byte_view(tensor)
    elif tensor.numel() * tensor.itemsize <= _PIECE_BYTES or tensor.dim() == 0:
        dense = (tensor.resolve_conj().resolve_neg() if lazy else tensor).contiguous()
        yield byte_view(dense)
    else:
        row_bytes = tensor[0].numel() * tensor.itemsize
        rows = _PIECE_BYTES // row_bytes
        for start in range(0, tensor.shape[0], max(rows, 1)):
            yield from _pieces(tensor[start : start + rows] if rows else tensor[start])
