"""A module's tensors by name, and how they come to lie in mapped memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mmrpc.errors import LayoutError, UnsupportedTensorError
from mmrpc.train.table import Spec, difference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a module; what is shared is there once."""
    return {**trained(module), **_frozen(module), **buffers_of(module)}


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if not p.requires_grad}


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers, by name: those that a state dict has."""
    kept = module.state_dict(keep_vars=True)
    return {name: b for name, b in module.named_buffers() if name in kept}


def sparse_names(module: nn.Module) -> frozenset[str]:
    """The parameters whose layers give sparse gradients: embeddings made with ``sparse=True``."""
    sparse = {
        id(layer.weight)
        for layer in module.modules()
        if getattr(layer, "sparse", False) is True and isinstance(layer.weight, torch.Tensor)
    }
    return frozenset(name for name, p in trained(module).items() if id(p) in sparse)


def specs_of(module: nn.Module) -> dict[str, Spec]:
    """The kinds of a module's tensors, by name.

    Raises:
        UnsupportedTensorError: If one of them cannot be mapped.
    """
    tensors = tensors_of(module)
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            kind = tensor.device if tensor.layout is torch.strided else tensor.layout
            raise UnsupportedTensorError(
                f"{name!r} is a tensor of {kind}, and only dense ones on the CPU can be mapped",
                hint="Give the server and its trainers a module on the CPU.",
            )
    return {name: Spec.of(tensor) for name, tensor in tensors.items()}


def check_same(expected: Mapping[str, Spec], found: Mapping[str, Spec], whose: str) -> None:
    """Refuses a module that has other tensors.

    Args:
        expected: The tensors that are needed.
        found: Those that there are.
        whose: What has them, for the error.

    Raises:
        LayoutError: Naming the first difference.
    """
    problem = difference(expected, found)
    if problem is not None:
        raise LayoutError(
            f"{whose} {problem}", hint="Build the module everywhere with the same arguments."
        )


def point(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Makes a module's parameters and buffers views of other memory, without a copy.

    The parameters stay the objects that they are, so that optimizers and hooks keep them; a
    graph that was built before keeps the old values.

    Args:
        module: The module.
        tensors: For each name that is to change, its new tensor, of the same kind.
    """
    for name, tensor in tensors_of(module).items():
        if name in tensors:
            tensor.data = tensors[name]
