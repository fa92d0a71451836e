"""The safetensors format: a length, a JSON header, and the tensors one behind the other.

Read here rather than by the safetensors package, whose tensors are copies or on storages that
do not know their file.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Final

import torch

from mmrpc.core.layout import Layout, contiguous_strides, numel

if TYPE_CHECKING:
    from mmrpc.core.formats.source import Source
    from mmrpc.core.tensor import MemoryMappedTensor

_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"


def _dtypes() -> dict[str, torch.dtype]:
    names = {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }
    # Which of the 8-bit floats there are depends on torch's version.
    return {name: getattr(torch, ours) for name, ours in names.items() if hasattr(torch, ours)}


_DTYPES: Final = _dtypes()


def looks_like(source: Source) -> bool:
    """Whether a file without a telling name starts as this format does."""
    if source.size_bytes < _LENGTH_BYTES + 2:
        return False
    (length,) = struct.unpack("<Q", source.read(0, _LENGTH_BYTES, "the header length"))
    fits = 2 <= length <= min(_MAX_HEADER_BYTES, source.size_bytes - _LENGTH_BYTES)
    return bool(fits) and source.read(_LENGTH_BYTES, 1, "the header") == b"{"


def read(source: Source, only: str | None = None) -> dict[str, MemoryMappedTensor]:
    """Maps the tensors of a safetensors file, by name, in the order of its header.

    Args:
        source: The file; all of its header is checked.
        only: Name of the one tensor to map. All are mapped if it is None, or not there.

    Raises:
        LayoutError: If the header is malformed, or the tensors overlap or leave holes.
        FileTooShortError: If the file ends early.
    """
    (length,) = struct.unpack("<Q", source.read(0, _LENGTH_BYTES, "the header length"))
    if length > _MAX_HEADER_BYTES:
        raise source.bad(f"the header claims {length:,} bytes; {_MAX_HEADER_BYTES:,} are allowed")
    entries = _parse(source, source.read(_LENGTH_BYTES, length, "the header"))
    data_start = _LENGTH_BYTES + length
    layouts = {name: _layout(source, name, entry) for name, entry in entries.items()}
    end = _check_ranges(source, layouts)
    source.check_end(data_start + end, "the last tensor")
    if data_start + end != source.size_bytes:
        raise source.bad(f"{source.size_bytes - data_start - end:,} bytes follow the last tensor")
    return {
        name: source.tensor(layout.moved(data_start + layout.offset_bytes), f"tensor {name!r}")
        for name, layout in layouts.items()
        if only not in layouts or name == only
    }


def _parse(source: Source, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is there twice")
        return found

    if not raw.startswith(b"{"):
        raise source.bad("the header does not start with '{'")
    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise source.bad(f"the header is no JSON: {error}") from None
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise source.bad("the header's __metadata__ is not a dict of strings")
    return dict(header)


def _layout(source: Source, name: str, entry: Any) -> Layout:
    """The layout of one tensor, with its offset from the start of the data."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise source.bad(f"tensor {name!r} is not a dict of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise source.bad(f"tensor {name!r} has the dtype {dtype!r}, which torch cannot map")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise source.bad(f"tensor {name!r} has the shape {shape!r} and the offsets {offsets!r}")
    start, end = offsets
    nbytes = numel(shape) * _DTYPES[dtype].itemsize
    if end - start != nbytes:
        raise source.bad(
            f"tensor {name!r} needs {nbytes:,} bytes and its offsets give it {end - start:,}"
        )
    return Layout(_DTYPES[dtype], tuple(shape), contiguous_strides(shape), start)


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)


def _check_ranges(source: Source, layouts: dict[str, Layout]) -> int:
    """Checks that the tensors follow each other; gives where the last one ends."""
    end = 0
    for name, layout in sorted(layouts.items(), key=lambda item: item[1].offset_bytes):
        if layout.span_bytes and layout.offset_bytes != end:
            problem = "overlaps the one before it" if layout.offset_bytes < end else "leaves a hole"
            raise source.bad(
                f"tensor {name!r} {problem}, at byte {layout.offset_bytes} of the data"
            )
        end = max(end, layout.end_bytes if layout.span_bytes else end)
    return end
