"""Which tensor is where in an arena file: the header of safetensors, computed and read. Pure.

An arena is a valid ``.safetensors`` file, so that a version of a training state can be opened by
whatever reads those. The format allows no gaps; ordering the tensors by falling element size
aligns each of them all the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from mmrpc.core.layout import Layout
from mmrpc.errors import LayoutError, UnsupportedTensorError

if TYPE_CHECKING:
    from collections.abc import Mapping

_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA: Final = "__metadata__"
_DATA_ALIGNMENT_BYTES: Final = 64
_LENGTH_BYTES: Final = 8
_LONGEST_HEADER_BYTES: Final = 100_000_000  # the limit of the format's own reader


@dataclass(frozen=True, slots=True)
class Spec:
    """What kind of tensor has a name.

    Attributes:
        dtype: Its dtype.
        shape: Its sizes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """The kind of an existing tensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Table:
    """The header of an arena.

    Attributes:
        layouts: For each name, where its tensor is in the file.
        metadata: Further text, by key.
        header: The bytes at the start of the file.
        nbytes: Size of the whole file.
    """

    layouts: dict[str, Layout]
    metadata: dict[str, str]
    header: bytes
    nbytes: int

    @classmethod
    def plan(cls, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> Table:
        """Lays tensors out.

        Args:
            specs: The tensors by name; those of one element size keep their order.
            metadata: Further text to have in the header.

        Raises:
            UnsupportedTensorError: If the format has no name for a dtype.
        """
        offset = 0
        places: dict[str, Layout] = {}
        document: dict[str, Any] = {_METADATA: dict(metadata or {})}
        for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
            if spec.dtype not in _NAMES:
                raise UnsupportedTensorError(
                    f"{name!r} is of {spec.dtype}, which safetensors files cannot hold",
                    hint="Convert it to a dtype that they can.",
                )
            if name == _METADATA:
                raise UnsupportedTensorError(
                    f"safetensors files cannot hold a tensor of the name {name!r}",
                    hint="Give it another name.",
                )
            places[name] = Layout.contiguous(spec.dtype, spec.shape, offset)
            end = offset + places[name].span_bytes
            document[name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % _DATA_ALIGNMENT_BYTES)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        layouts = {name: at.moved(len(header) + at.offset_bytes) for name, at in places.items()}
        return cls(layouts, document[_METADATA], header, len(header) + offset)

    @classmethod
    def parse(cls, data: memoryview) -> Table:
        """Reads the header of a file.

        Args:
            data: The bytes of the whole file.

        Raises:
            LayoutError: If it is no safetensors file, or not a whole one.
        """
        if len(data) < _LENGTH_BYTES:
            raise LayoutError("it is too short for a safetensors file")
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        start = _LENGTH_BYTES + length
        if length > _LONGEST_HEADER_BYTES or start > len(data):
            raise LayoutError("its header does not end in it: it is no safetensors file, or cut")
        header = bytes(data[:start])
        try:
            document = json.loads(header[_LENGTH_BYTES:])
            metadata = {str(k): str(v) for k, v in document.pop(_METADATA, {}).items()}
            layouts = {name: _read(entry, start) for name, entry in document.items()}
        except LayoutError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LayoutError(f"its header cannot be read: {error}") from None
        ends = (layout.offset_bytes + layout.span_bytes for layout in layouts.values())
        nbytes = max(ends, default=start)
        if nbytes != len(data):
            raise LayoutError(f"it has {len(data):,} bytes, and its header tells of {nbytes:,}")
        return cls(layouts, metadata, header, nbytes)

    def specs(self) -> dict[str, Spec]:
        """The kinds of the tensors, by name."""
        return {name: Spec(at.dtype, at.shape) for name, at in self.layouts.items()}


def _read(entry: dict[str, Any], start: int) -> Layout:
    first, end = entry["data_offsets"]
    layout = Layout.contiguous(_DTYPES[entry["dtype"]], tuple(entry["shape"]), start + first)
    layout.check()
    if first < 0 or layout.span_bytes != end - first:
        raise LayoutError(f"the offsets {first} to {end} do not suit the shape {layout.shape}")
    return layout


def difference(expected: Mapping[str, Spec], found: Mapping[str, Spec]) -> str | None:
    """Says in what two sets of tensors differ first, or None if they do not.

    Returns:
        A clause about ``found``, such as ``lacks 'fc.weight'``.
    """
    for name, spec in expected.items():
        if name not in found:
            return f"lacks {name!r}"
        if found[name] != spec:
            return f"has {name!r} as {found[name]} instead of {spec}"
    for name in found:
        if name not in expected:
            return f"has {name!r} in addition"
    return None
