"""Tensors shared across processes and nodes by reference: send the reference, not the tensor."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mmrpc._version import __version__

if TYPE_CHECKING:
    from mmrpc import errors
    from mmrpc.core.formats import open
    from mmrpc.core.reference import TensorRef, ref
    from mmrpc.core.tensor import MemoryMappedTensor
    from mmrpc.core.trees import load_tree, save_tree

__all__ = [
    "MemoryMappedTensor",
    "TensorRef",
    "__version__",
    "errors",
    "load_tree",
    "open",
    "ref",
    "save_tree",
]

_HOME = {
    "MemoryMappedTensor": "mmrpc.core.tensor",
    "TensorRef": "mmrpc.core.reference",
    "load_tree": "mmrpc.core.trees",
    "open": "mmrpc.core.formats",
    "ref": "mmrpc.core.reference",
    "save_tree": "mmrpc.core.trees",
}


def __getattr__(name: str) -> Any:
    # Nothing is imported before it is needed: a launcher or `mmrpc --help` needs no torch.
    if name == "errors":
        return importlib.import_module("mmrpc.errors")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
