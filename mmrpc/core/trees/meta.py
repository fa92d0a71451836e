"""The ``meta.json`` of a directory of tensors, as tensordict writes and reads it: text, no files.

Each directory has one; it names the leaves with dtype and shape, and the subdirectories. What
mmrpc adds stands under one key that tensordict passes over.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from mmrpc.core.layout import DTYPES, numel
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    import torch

META: Final = "meta.json"
EXTRA_KEY: Final = "_mmrpc"
FORMAT_VERSION: Final = 1

_TENSORDICT: Final = {
    "_type": "<class 'tensordict._td.TensorDict'>",
    "_format_version": FORMAT_VERSION,
    "_class": "tensordict:TensorDict",
}
_VALUE_TYPE: Final = "<class 'tensordict.tensorclass.NonTensorData'>"
_RESERVED: Final = frozenset({"shape", "device", "_names", EXTRA_KEY, *_TENSORDICT})
_UNSAFE: Final = re.compile(r'[/<>:"|?*\\ %\x00-\x1f\x7f]')


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor in a directory.

    Attributes:
        dtype: Of its elements.
        shape: Its sizes; of a nested tensor, the two sizes of its 2-D tensor of sizes.
        is_nested: Whether it is a nested tensor, whose sizes are in a file of their own.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_nested: bool = False

    @property
    def has_no_file(self) -> bool:
        """Whether tensordict writes no file for it."""
        return not self.is_nested and numel(self.shape) == 0


@dataclass(frozen=True, slots=True)
class Meta:
    """What a directory holds.

    Attributes:
        leaves: Its tensors, by key.
        children: Keys of its subdirectories.
        batch_size: First sizes that all leaves share.
        extra: What mmrpc adds.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    children: tuple[str, ...] = ()
    batch_size: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


def file_stem(key: str) -> str:
    """The name of a key's file or subdirectory, without ending; it never leaves the directory.

    Raises:
        LayoutError: If the key is no string, or one that ``meta.json`` uses itself.
    """
    if not isinstance(key, str):
        raise LayoutError(f"a key must be a string, not {key!r}")
    if key in _RESERVED:
        raise LayoutError(f"the key {key!r} is one that meta.json uses itself")
    if not key:
        return "%"
    if key in (".", ".."):
        return "%2E" * len(key)
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", key)


def dump(meta: Meta, *, types: dict[str, str] | None = None) -> bytes:
    """Writes a ``meta.json``.

    Args:
        meta: What the directory holds.
        types: For each child that is no directory of tensors, tensordict's name for it.
    """
    types = types or {}
    fields: dict[str, Any] = {
        key: {
            "device": "cpu",
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "is_nested": leaf.is_nested,
        }
        for key, leaf in meta.leaves.items()
    }
    fields |= {key: {"type": types.get(key, "TensorDict")} for key in meta.children}
    fields |= {"shape": list(meta.batch_size), "device": "cpu", **_TENSORDICT}
    if meta.extra:
        fields[EXTRA_KEY] = meta.extra
    return json.dumps(fields).encode()


def parse(text: bytes, path: str) -> Meta:
    """Reads a ``meta.json`` of a directory of tensors.

    Raises:
        LayoutError: If it is malformed, or of something else.
    """
    fields = _object(text, path)
    kind = fields.get("_class") or fields.get("_type")
    if kind not in (_TENSORDICT["_class"], _TENSORDICT["_type"]):
        raise LayoutError(
            f"{path!r} is of a {kind!r}, not of a plain dict of tensors",
            hint="Save it with tensordict's to_tensordict().memmap(...).",
        )
    version = fields.get("_format_version", 0)
    if type(version) is int and version > FORMAT_VERSION:
        raise LayoutError(f"{path!r} has the format version {version}; {FORMAT_VERSION} is known")
    entries = {
        key: entry for key, entry in fields.items() if isinstance(entry, dict) and key != EXTRA_KEY
    }
    leaves = {
        key: _leaf(key, entry, path)
        for key, entry in entries.items()
        if "type" not in entry and "dtype" in entry
    }
    children = tuple(key for key, entry in entries.items() if "type" in entry)
    batch_size = fields.get("shape", [])
    extra = fields.get(EXTRA_KEY, {})
    if not _are_sizes(batch_size) or not isinstance(extra, dict):
        raise LayoutError(f"{path!r} is malformed: its shape is {batch_size!r}")
    return Meta(leaves, children, tuple(batch_size), extra)


def _object(text: bytes, path: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{path!r} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise LayoutError(f"{path!r} is no JSON object")
    return fields


def _leaf(key: str, entry: dict[str, Any], path: str) -> Leaf:
    dtype, shape, is_nested = entry["dtype"], entry.get("shape"), entry.get("is_nested", False)
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    if name not in DTYPES or not _are_sizes(shape) or type(is_nested) is not bool:
        raise LayoutError(f"{path!r} is malformed: {key!r} has dtype {dtype!r} and shape {shape!r}")
    if is_nested and len(shape) != 2:
        raise LayoutError(f"{path!r} is malformed: {key!r} is nested and has shape {shape!r}")
    return Leaf(DTYPES[name], tuple(shape), is_nested)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def check_value(value: Any, key: str) -> None:
    """Checks that a value other than a tensor comes back from JSON as it is.

    Raises:
        LayoutError: If it does not: no code is ever run to load one.
    """
    try:
        same = _is_same(json.loads(json.dumps(value)), value)
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise LayoutError(
            f"{key!r} is a {type(value).__name__}, which meta.json cannot hold",
            hint="Tensors, dicts with string keys, lists, strings, numbers, booleans and None can "
            "be saved.",
        )


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b or (a != a and b != b))  # NaN


def dump_value(value: Any) -> bytes:
    """Writes the ``meta.json`` of a value other than a tensor."""
    return json.dumps(
        {"_type": _VALUE_TYPE, "data": value, "_metadata": None, "_is_non_tensor": True}
    ).encode()


def parse_value(text: bytes, path: str) -> tuple[bool, Any]:
    """Reads a ``meta.json`` of a value other than a tensor.

    Returns:
        Whether it is one, and the value.

    Raises:
        LayoutError: If the value was pickled.
    """
    fields = _object(text, path)
    kind = str(fields.get("_type"))
    if "NonTensor" not in kind:
        return False, None
    if "data" not in fields:
        raise LayoutError(
            f"{path!r} is of a pickled value, and reading one would run code from it",
            hint="Load it with tensordict, and save tensors, strings and numbers.",
        )
    return True, fields["data"]
