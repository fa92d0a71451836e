"""For mypy: the lazily imported public names have their own types."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import mmrpc

if TYPE_CHECKING:
    import torch

    from mmrpc.core.reference import TensorRef
    from mmrpc.core.tensor import MemoryMappedTensor
    from mmrpc.errors import PathError


def names_are_typed(text: str, plain: torch.Tensor, error: mmrpc.errors.PathError) -> None:
    """The names are those of the modules that they live in, not Any."""
    reference = mmrpc.TensorRef.from_json(text)
    assert_type(reference, TensorRef)
    assert_type(reference.open(), MemoryMappedTensor)
    assert_type(mmrpc.ref(plain), TensorRef)
    assert_type(error, PathError)
    assert_type(mmrpc.__version__, str)
