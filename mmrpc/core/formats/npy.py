"""NumPy's ``.npy``: a short header, then the elements, in C or Fortran order.

The header is read here rather than by NumPy, which is an optional install, and which would
unpickle object arrays if asked to.
"""

from __future__ import annotations

import ast
import struct
from typing import TYPE_CHECKING, Any, Final

import torch

from mmrpc.core.layout import Layout, contiguous_strides

if TYPE_CHECKING:
    from mmrpc.core.formats.source import Source
    from mmrpc.core.tensor import MemoryMappedTensor

MAGIC: Final = b"\x93NUMPY"

_MAX_HEADER_BYTES: Final = 10_000  # NumPy's own limit for what it will parse
_LENGTHS: Final = {1: "<H", 2: "<I", 3: "<I"}
_KINDS: Final[dict[str, torch.dtype]] = {
    "b1": torch.bool,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "c8": torch.complex64,
    "c16": torch.complex128,
}


def read(source: Source) -> MemoryMappedTensor:
    """Maps the array of a ``.npy`` file.

    Raises:
        LayoutError: If the header is malformed, or torch has no such dtype.
        FileTooShortError: If the file ends early.
    """
    if source.read(0, len(MAGIC), "the magic string") != MAGIC:
        raise source.bad("it does not start as a .npy file does")
    major, minor = source.read(len(MAGIC), 2, "the version")
    if major not in _LENGTHS:
        raise source.bad(f".npy version {major}.{minor} is unknown")
    form, start = _LENGTHS[major], len(MAGIC) + 2
    (length,) = struct.unpack(form, source.read(start, struct.calcsize(form), "the header length"))
    if length > _MAX_HEADER_BYTES:
        raise source.bad(f"the header claims {length:,} bytes; {_MAX_HEADER_BYTES:,} are allowed")
    start += struct.calcsize(form)
    header = _parse(source, source.read(start, length, "the header"), latin=major < 3)
    shape = _shape(source, header["shape"])
    if header["fortran_order"]:
        strides = tuple(reversed(contiguous_strides(shape[::-1])))
    else:
        strides = contiguous_strides(shape)
    layout = Layout(_dtype(source, header["descr"]), shape, strides, start + length)
    return source.tensor(layout, "the array")


def _parse(source: Source, raw: bytes, *, latin: bool) -> dict[str, Any]:
    try:
        header = ast.literal_eval(raw.decode("latin-1" if latin else "utf-8").strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise source.bad(f"the header cannot be parsed: {error}") from None
    wanted = {"descr": object, "fortran_order": bool, "shape": tuple}
    if not isinstance(header, dict) or set(header) != set(wanted):
        raise source.bad("the header is not a dict of descr, fortran_order and shape")
    for name, kind in wanted.items():
        if not isinstance(header[name], kind):
            raise source.bad(f"the header's {name} is {header[name]!r}")
    return header


def _shape(source: Source, shape: tuple[Any, ...]) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in shape):
        raise source.bad(f"the header's shape is {shape!r}")
    return shape


def _dtype(source: Source, descr: Any) -> torch.dtype:
    if not isinstance(descr, str):
        raise source.bad(
            "it holds records (a structured dtype), which no tensor does",
            "Save each field as an array of its own.",
        )
    order, kind = descr[:1], descr[1:]
    if kind.startswith("O"):
        raise source.bad("it holds pickled Python objects", "Save numbers: they can be mapped.")
    if kind not in _KINDS:
        raise source.bad(f"torch has no dtype for NumPy's {descr!r}")
    dtype = _KINDS[kind]
    if order == ">" and dtype.itemsize > 1:
        raise source.bad(
            f"its elements are big-endian ({descr!r}), and this machine is not",
            "Save it as a.astype(a.dtype.newbyteorder('<')).",
        )
    if order not in ("<", "|", "=", ">"):
        raise source.bad(f"the header's descr is {descr!r}")
    return dtype
