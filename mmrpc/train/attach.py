"""A module's tensors by name, and how they come to lie in mapped memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from mmrpc.errors import LayoutError, UnsupportedTensorError
from mmrpc.train import arguments
from mmrpc.train.table import Spec, difference

if TYPE_CHECKING:
    from collections.abc import Mapping

OPTIMIZER_PREFIX: Final = "optim/"
"""What the names of an optimizer's tensors start with; all others are the module's."""


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
        ConfigError: If it is no module.
        UnsupportedTensorError: If one of its tensors cannot be mapped, or two of them share memory
            without being one and the same: they would be apart afterwards.
    """
    arguments.instance("module", module, nn.Module)
    tensors = tensors_of(module)
    for name, tensor in tensors.items():
        _check_kind(name, tensor)
    _check_apart(tensors)
    return {name: Spec.of(tensor) for name, tensor in tensors.items()}


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    if name.startswith(OPTIMIZER_PREFIX):
        raise UnsupportedTensorError(
            f"the module has a tensor {name!r}, and {OPTIMIZER_PREFIX!r} is how the names of an"
            " optimizer's start",
            hint="Give it another name.",
        )
    if nn.parameter.is_lazy(tensor):
        raise UnsupportedTensorError(
            f"{name!r} has no shape yet", hint="Run the module once on a batch before."
        )
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        odd = (str(tensor.layout), tensor.dtype)[tensor.is_quantized]
        kind = odd if tensor.device.type == "cpu" else tensor.device
        raise UnsupportedTensorError(
            f"{name!r} is a tensor of {kind}, and only dense ones on the CPU can be mapped",
            hint="Give the server and its trainers a module on the CPU.",
        )


def _check_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.nbytes and tensor.is_contiguous()
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise UnsupportedTensorError(
                f"{name!r} and {other!r} share memory and are not the same parameter",
                hint="Tie them by giving both layers one parameter.",
            )


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
