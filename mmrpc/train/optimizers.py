"""What an optimizer keeps for each parameter, found out by a trial, and moved to mapped memory.

Any `torch.optim.Optimizer` will do whose state for a parameter is tensors and numbers: they are
found by stepping a copy of it once on parameters of zeros.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from mmrpc.errors import UnsupportedTensorError
from mmrpc.train.table import Spec
from mmrpc.train.versions import OPTIMIZER_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_PRESENT: Final = f"{OPTIMIZER_PREFIX}#present"
# A number is kept as a tensor of no dimensions; its kind stands in the name.
_NUMBERS: Final[dict[type, tuple[str, torch.dtype]]] = {
    bool: ("#bool", torch.bool),
    int: ("#int", torch.int64),
    float: ("#float", torch.float64),
}
_KINDS: Final = {suffix: kind for kind, (suffix, _) in _NUMBERS.items()}


def build(
    optimizer: Factory | torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Gives the optimizer of these parameters.

    Args:
        optimizer: One that has been made for some of them, or what makes one.
        parameters: All that require gradients, by name.

    Raises:
        ValueError: If it was made for others.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(parameters.values()))
    known = {id(p) for p in parameters.values()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "the optimizer has parameters that are not the module's, or need no gradients"
        )
    return optimizer


def probe(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    sparse: Collection[str],
) -> dict[str, Spec]:
    """Finds out what an optimizer keeps, without touching it or its parameters.

    Args:
        optimizer: The optimizer.
        parameters: Its parameters by name.
        sparse: Names of those that get sparse gradients.

    Returns:
        The tensors to reserve, by the names that they have in an arena.

    Raises:
        UnsupportedTensorError: If it needs a closure, or keeps what is no tensor or number.
    """
    stand_ins = {name: nn.Parameter(torch.zeros_like(p)) for name, p in parameters.items()}
    memo = {id(p): stand_ins[name] for name, p in parameters.items()}
    trial: torch.optim.Optimizer = copy.deepcopy(optimizer, memo)
    for name, p in stand_ins.items():
        p.grad = _no_rows(p) if name in sparse else torch.zeros_like(p)
    kind = type(optimizer).__name__
    try:
        trial.step()
    except TypeError as error:
        raise UnsupportedTensorError(
            f"{kind}.step() cannot be called by the server alone: {error}",
            hint="An optimizer that evaluates the model by itself, such as LBFGS, cannot be used.",
        ) from None
    specs = {_PRESENT: Spec(torch.uint8, (len(parameters),))}
    for name, p in stand_ins.items():
        for key, value in trial.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                specs[_entry(name, key)] = Spec.of(value)
            elif type(value) in _NUMBERS:
                suffix, dtype = _NUMBERS[type(value)]
                specs[_entry(name, key) + suffix] = Spec(dtype, ())
            elif value is not None:
                raise UnsupportedTensorError(
                    f"{kind} keeps {key!r} as a {type(value).__name__}",
                    hint="Only an optimizer whose state is tensors and numbers can be mapped.",
                )
    return specs


def adopt(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Moves what a step has made new into the arena, and makes the state views of it again.

    A tensor that the step changed in place is a view already and costs nothing.

    Args:
        optimizer: The optimizer.
        parameters: Its parameters by name.
        tensors: The arena's.

    Raises:
        UnsupportedTensorError: If it keeps something that the trial did not show.
    """
    for number, (name, p) in enumerate(parameters.items()):
        state = optimizer.state.get(p, {})
        tensors[_PRESENT][number] = bool(state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = _moved(value, tensors, _entry(name, key))
            elif type(value) in _NUMBERS:
                entry = _entry(name, key) + _NUMBERS[type(value)][0]
                _known(tensors, entry).fill_(value)


def restore(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Makes an optimizer's state views of an arena that has one."""
    for number, (name, p) in enumerate(parameters.items()):
        optimizer.state.pop(p, None)
        if not tensors[_PRESENT][number]:
            continue
        start = _entry(name, "")
        state = optimizer.state[p]
        for entry, tensor in tensors.items():
            if not entry.startswith(start):
                continue
            key, mark, kind = entry.removeprefix(start).partition("#")
            state[key] = _KINDS[mark + kind](tensor.item()) if mark else tensor


def _entry(name: str, key: str) -> str:
    return f"{OPTIMIZER_PREFIX}{name}/{key}"


def _moved(value: torch.Tensor, tensors: Mapping[str, torch.Tensor], entry: str) -> torch.Tensor:
    place = _known(tensors, entry)
    if value.data_ptr() != place.data_ptr():
        if Spec.of(value) != Spec.of(place):
            raise UnsupportedTensorError(
                f"the optimizer made {entry!r} a {Spec.of(value)}, and it was a {Spec.of(place)}"
            )
        place.copy_(value)
    return place


def _known(tensors: Mapping[str, torch.Tensor], entry: str) -> torch.Tensor:
    try:
        return tensors[entry]
    except KeyError:
        raise UnsupportedTensorError(
            f"the optimizer now keeps {entry!r}, which its first step did not"
        ) from None


def _no_rows(p: torch.Tensor) -> torch.Tensor:
    return sparse_rows(torch.empty(0, dtype=torch.int64), p.new_empty((0, *p.shape[1:])), p.shape)


def sparse_rows(rows: torch.Tensor, values: torch.Tensor, shape: Collection[int]) -> torch.Tensor:
    """A sparse gradient: values for some rows of a parameter.

    Args:
        rows: Their numbers, int64 [n].
        values: Their values [n, ...].
        shape: Sizes of the parameter.
    """
    return torch.sparse_coo_tensor(rows[None], values, tuple(shape), check_invariants=True)
