"""Tensors inside files that others wrote, mapped where they are: .safetensors, .npy, .pt, raw.

Nothing in a file is trusted and no code in one is run. Every way a file can be bad is a
`LayoutError` or a `PathError` that says where.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mmrpc.core import creation
from mmrpc.core.formats.source import Source, open_source
from mmrpc.core.resolver import get_resolver
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mmrpc.core.constructors import Size
    from mmrpc.core.creation import Filename

_HEAD_BYTES = 8


def open(
    path_or_url: Filename,
    key: str | None = None,
    mode: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    shape: Size | None = None,
    offset: int = 0,
    copy_misaligned: bool = False,
) -> Any:
    """Maps the tensors of a file; none of their bytes is read or copied.

    Args:
        path_or_url: The file, which stays the caller's. Symbolic links are followed, since the
            caller named them. A URL is opened through the mounts of the cluster's config.
        key: Name of one tensor, where the file names them; dots lead into nested dicts of a
            ``.pt`` file or of a tree. None for all.
        mode: ``"r+"``: writes reach the file. None or ``"r"``: they stay in this process, since
            a file that somebody else wrote is not changed by accident.
        dtype: For a raw file, which holds elements and nothing else.
        shape: Likewise; a 2-D tensor for a nested one.
        offset: Likewise: bytes before the first element.
        copy_misaligned: Whether a tensor whose bytes do not stand at a multiple of its element
            size is copied into shared memory. If not, it is an error.

    Returns:
        For ``.npy`` and raw files a `MemoryMappedTensor`; for ``.safetensors`` a dict of them;
        for ``.pt`` and ``.pth`` what was saved, with mapped tensors in it; for the arena of
        `mmrpc.save_tree` its `Tree`. With `key`, that one tensor.

    Raises:
        PathError: The subclass that fits, such as `FileTooShortError` for a truncated file.
        LayoutError: If it is malformed, of no known format, holds what cannot be mapped, or has
            no tensor of that name.
        ConfigError: For a URL, while no cluster's mounts are known.
    """
    path = local_copy(os.fsdecode(os.fspath(path_or_url)))
    if dtype is not None or shape is not None:
        return _open_raw(path, key, mode, dtype, shape, offset)
    if offset:
        raise LayoutError("an offset is for raw files", hint="Pass dtype= and shape= too.")
    with open_source(path, mode or "r", copy_misaligned=copy_misaligned) as source:
        found = _reader_for(source, key)(source)
    return found if key is None else _pick(found, key, path)


def _open_raw(
    path: str,
    key: str | None,
    mode: str | None,
    dtype: torch.dtype | None,
    shape: Size | None,
    offset: int,
) -> torch.Tensor:
    from mmrpc.core.tensor import MemoryMappedTensor

    if dtype is None or shape is None:
        raise LayoutError(
            "a raw file holds the elements alone", hint="Pass both dtype= and shape=."
        )
    if key is not None:
        raise LayoutError("a raw file has no keys")
    path = os.path.realpath(path)
    return MemoryMappedTensor.from_filename(path, dtype, shape, mode=mode or "r", offset=offset)


def local_copy(path: str) -> str:
    """The local path of a file that may be given as a URL; see `Resolver.local_copy`.

    Raises:
        ConfigError: For a URL, while no cluster's mounts are known.
        PathError: If the file is missing, or cannot be copied here.
    """
    return get_resolver().local_copy(path) if creation.is_url(path) else path


def _reader_for(source: Source, key: str | None) -> Callable[[Source], Any]:
    """The reader of a file's format, told by its first bytes; names can be anything."""
    from mmrpc.core.formats import npy, safetensors, torchzip
    from mmrpc.core.trees import table as arenatable

    head = source.read(0, min(_HEAD_BYTES, source.size_bytes), "its first bytes")
    suffix = os.path.splitext(source.name)[1].lower()
    if head == arenatable.MAGIC:
        return _read_arena
    if head.startswith(npy.MAGIC) or suffix == ".npy":
        return npy.read
    if suffix == ".safetensors":
        return partial(safetensors.read, only=key)
    if head.startswith(torchzip.MAGIC) or suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return torchzip.read
    if safetensors.looks_like(source):  # Hugging Face's caches name files by their digest
        return partial(safetensors.read, only=key)
    raise LayoutError(
        f"{source.path!r} has none of the known formats (.safetensors, .npy, torch's .pt)",
        hint="If it has elements and nothing else: mmrpc.open(path, dtype=..., shape=...).",
    )


def _read_arena(source: Source) -> Any:
    import torch

    from mmrpc.core.layout import Layout
    from mmrpc.core.trees import arena

    whole = source.tensor(Layout.contiguous(torch.uint8, (source.size_bytes,)), "the arena")
    return arena.open_arena(whole, repr(source.path))


def _pick(found: Any, key: str, path: str) -> Any:
    if isinstance(found, Mapping) and key in found:
        return found[key]
    value = found
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            names = sorted(map(str, found)) if isinstance(found, Mapping) else []
            told = f"it has {', '.join(names[:8])}" if names else "it has one tensor without a name"
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise LayoutError(f"{path!r} has no tensor {key!r}: {told}{more}")
        value = value[part]
    return value


__all__ = ["local_copy", "open"]
