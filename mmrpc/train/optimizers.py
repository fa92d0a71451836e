"""What an optimizer keeps for each parameter, found out by a trial, and moved to mapped memory.

Any `torch.optim.Optimizer` will do whose state for a parameter is tensors and numbers: they are
found by stepping a copy of it once on parameters of zeros.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from mmrpc.errors import ConfigError, LayoutError, MmrpcError, UnsupportedTensorError
from mmrpc.train import arguments
from mmrpc.train.attach import OPTIMIZER_PREFIX
from mmrpc.train.table import Spec

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
        ConfigError: If it is no optimizer and makes none, or was made for others.
        UnsupportedTensorError: If there are no parameters that require gradients.
    """
    if not parameters:
        raise UnsupportedTensorError(
            "the module has no parameters that require gradients: there is nothing to train"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ConfigError(
                f"it must make an optimizer of parameters, and is a {type(optimizer).__name__}",
                key="optimizer",
                hint="Pass torch.optim.SGD, say, or a function that makes one.",
            )
        optimizer = optimizer(list(parameters.values()))
        arguments.instance("what optimizer makes", optimizer, torch.optim.Optimizer)
    known = {id(p) for p in parameters.values()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "it has parameters that are not the module's, or need no gradients", key="optimizer"
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
    for name, p in stand_ins.items():
        p.grad = _no_rows(p) if name in sparse else torch.zeros_like(p)
    kind = type(optimizer).__name__
    try:
        trial = _copy(optimizer, {id(p): stand_ins[name] for name, p in parameters.items()})
        trial.step()
    except Exception as error:
        raise UnsupportedTensorError(
            f"{kind} cannot make a step on the server: {error}",
            hint="One that evaluates the model by itself, such as LBFGS, cannot be used.",
        ) from error
    specs = {_PRESENT: Spec(torch.uint8, (len(parameters),))}
    for name, p in stand_ins.items():
        for key, value in trial.state.get(p, {}).items():
            if not isinstance(key, str) or "/" in key or "#" in key:
                raise UnsupportedTensorError(f"{kind} keeps something under the name {key!r}")
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


def _copy(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy with other parameters, and without the hooks: they are for real steps."""
    attributes = {
        key: value
        for key, value in vars(optimizer).items()
        # A learning-rate scheduler puts a step of its own over that of the class.
        if key != "step" and not key.endswith("_hooks")
    }
    found: torch.optim.Optimizer = copy.copy(optimizer)
    vars(found).update(copy.deepcopy(attributes, memo))
    return found


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
    entries: dict[str, list[tuple[str, str]]] = {name: [] for name in parameters}
    for entry in tensors:
        name, slash, key = entry.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
        if slash and entry.startswith(OPTIMIZER_PREFIX):
            entries[name].append((key, entry))
    for number, (name, p) in enumerate(parameters.items()):
        optimizer.state.pop(p, None)
        if not tensors[_PRESENT][number]:
            continue
        state = optimizer.state[p]
        for key, entry in entries[name]:
            key, mark, kind = key.partition("#")
            state[key] = _KINDS[mark + kind](tensors[entry].item()) if mark else tensors[entry]


def check_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    state: Any,
) -> None:
    """Refuses the state dict of another optimizer, changing nothing.

    Raises:
        LayoutError: Saying what does not fit.
    """
    stand_ins = {name: nn.Parameter(torch.empty_like(p)) for name, p in parameters.items()}
    try:
        trial = _copy(optimizer, {id(p): stand_ins[name] for name, p in parameters.items()})
        trial.load_state_dict(state)
        for name, p in stand_ins.items():
            for key, value in trial.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    _moved(value, tensors, _entry(name, key), only_check=True)
                elif type(value) in _NUMBERS:
                    _known(tensors, _entry(name, key) + _NUMBERS[type(value)][0])
    except Exception as error:
        reason = error.reason if isinstance(error, MmrpcError) else str(error)
        raise LayoutError(f"the optimizer's state dict does not fit: {reason}") from None


def _entry(name: str, key: str) -> str:
    return f"{OPTIMIZER_PREFIX}{name}/{key}"


def _moved(
    value: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    entry: str,
    *,
    only_check: bool = False,
) -> torch.Tensor:
    place = _known(tensors, entry)
    if value.data_ptr() != place.data_ptr():
        if Spec.of(value) != Spec.of(place):
            raise UnsupportedTensorError(
                f"the optimizer made {entry!r} a {Spec.of(value)}, and it was a {Spec.of(place)}"
            )
        if not only_check:
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
