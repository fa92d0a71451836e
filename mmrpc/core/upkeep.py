"""What a mapped tensor can be asked for after it was made: flush, advise, check."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from mmrpc.core import files
from mmrpc.core.layout import Layout
from mmrpc.core.location import Mode
from mmrpc.core.mapping import FileMapping, Mapping, check_alive
from mmrpc.core.nested import NestedLayout
from mmrpc.core.resolver import get_resolver
from mmrpc.core.storage import mapped_storage
from mmrpc.core.system import libc
from mmrpc.errors import LayoutError, NotSharedError

if TYPE_CHECKING:
    import torch

_NOT_OFFERED: Final = (errno.EINVAL, errno.ENOSYS)


def _span(tensor: torch.Tensor) -> tuple[Mapping, int, int] | None:
    """The mapping of a tensor, and where in it the tensor starts and how long it is, in bytes."""
    storage = mapped_storage(tensor)
    if storage is None or storage._mapping is None:
        return None
    layout: Layout | NestedLayout
    if tensor.is_nested:
        layout = NestedLayout.of(tensor, storage._start_bytes)
    else:
        layout = Layout.of(tensor, storage._start_bytes)
    mapping = storage._mapping
    return mapping, layout.offset_bytes - mapping.start_bytes, layout.span_bytes


def flush(tensor: torch.Tensor, *, wait: bool) -> None:
    """Writes a tensor's changed pages to its file; see `MemoryMappedTensor.flush`."""
    span = _span(tensor)
    if span is None or not isinstance(span[0], FileMapping):
        return  # memory has nowhere to go
    mapping, start, nbytes = span
    if mapping.mode is Mode.READ:
        if mapping.has_private_writes(start, nbytes):
            raise NotSharedError(
                'it was opened with mode "r", so what was written to it is in no file',
                path=mapping.path,
                node=get_resolver().node,
                hint='Open it with mode "r+" to write to it.',
            )
        return
    if nbytes:
        try:
            # munmap is no flush on NFS, msync is; see nfs(5).
            libc.msync(*mapping.pages(start, nbytes), wait=wait)
        except OSError as error:
            raise files.path_error(error, mapping.describe(), writing=True) from None


def advise(tensor: torch.Tensor, advice: str) -> None:
    """Tells the kernel how a tensor will be read; see `MemoryMappedTensor.advise`."""
    if advice not in libc.ADVICE:
        raise LayoutError(f"advice must be one of {', '.join(libc.ADVICE)}, not {advice!r}")
    span = _span(tensor)
    if span is None or not span[2]:
        return
    mapping, start, nbytes = span
    if advice == "dontneed" and not _may_drop(mapping):
        return
    try:
        libc.madvise(*mapping.pages(start, nbytes), libc.ADVICE[advice])
    except OSError as error:
        if error.errno not in _NOT_OFFERED:  # advice that this kernel or file system lacks
            raise files.path_error(error, mapping.describe()) from None


def _may_drop(mapping: Mapping) -> bool:
    """Whether dropping pages loses nothing: a private map would lose what was written to it."""
    return isinstance(mapping, FileMapping) and mapping.mode is Mode.WRITE


def check(tensor: torch.Tensor) -> None:
    """Checks that what a tensor maps is still there; see `MemoryMappedTensor.check`."""
    span = _span(tensor)
    if span is None:
        raise NotSharedError("the tensor is in this process's own memory", hint="It needs none.")
    mapping, start, nbytes = span
    if isinstance(mapping, FileMapping):
        check_alive(mapping, mapping.start_bytes + start + nbytes, node=get_resolver().node)
