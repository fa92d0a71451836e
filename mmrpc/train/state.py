"""The state of a training: parameters, buffers and optimizer state in one mapped arena.

It knows how to make a step and how to say afterwards, even after a SIGKILL, whether a step was
under way.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

import torch

from mmrpc.core.system import host
from mmrpc.errors import LayoutError, PathExistsError, PathNotFoundError
from mmrpc.train import attach, optimizers
from mmrpc.train.arena import Arena
from mmrpc.train.attach import OPTIMIZER_PREFIX
from mmrpc.train.table import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from mmrpc.train.version import Version
    from mmrpc.train.versions import Versions

FILE_NAME: Final = "live.safetensors"
# One more than the numbers of the last step begun and the last one done; zeros: nothing is there.
_STEPS: Final = f"{OPTIMIZER_PREFIX}#steps"
_HOST: Final = "host"


class TrainingState:
    """A module and its optimizer whose tensors are views of one mapped file.

    Args:
        module: The module; its parameters stay the same objects.
        optimizer: An optimizer of its parameters, or what makes one of them.
        directory: Where the file is; it must exist.
        versions: Where to go on from if there is no state, or half a step in it.
        resume: Whether to go on from what is in the directory.
        trust_live: Whether to go on from the live file too, if no step is under way in it.

    Attributes:
        arena: All tensors.
        parameters: Those parameters that are trained, by name.
        sparse: Names of those that get sparse gradients.
        step_number: How many steps were made.
        resumed_from: The step that it went on from; None if it is new.

    Raises:
        PathExistsError: If `resume` is false and the directory has a state.
        LayoutError: If the state in the directory is of another module or optimizer.
        NoSpaceError: If there is too little space for it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: optimizers.Factory | torch.optim.Optimizer,
        directory: str,
        versions: Versions,
        *,
        resume: bool,
        trust_live: bool,
    ) -> None:
        self.module = module
        self._module_specs = attach.specs_of(module)
        self.parameters = attach.trained(module)
        self.sparse = attach.sparse_names(module)
        self.optimizer = optimizers.build(optimizer, self.parameters)
        kept = optimizers.probe(self.optimizer, self.parameters, self.sparse)
        specs = {**self._module_specs, **kept, _STEPS: Spec(torch.int64, (2,))}
        path = os.path.join(directory, FILE_NAME)
        if not resume and (os.path.lexists(path) or versions.numbers()):
            raise PathExistsError(
                "it has the state of a training",
                path=directory,
                hint="Choose another directory, or pass resume=True to go on from it.",
            )
        self.resumed_from: int | None = None
        live = _open_whole(path, specs) if trust_live else None
        newest = versions.newest()
        if live is not None and _done(live) >= (newest.number if newest else 0):
            self.arena = live
            self.resumed_from = _done(live)
        else:
            self.arena = Arena.create(
                specs, filename=path, metadata={_HOST: host.host_id()}, existsok=True
            )
            try:
                self._fill(newest)
            except BaseException:
                self.discard()
                raise
        attach.point(module, self.arena.tensors)
        if self.resumed_from is not None:
            optimizers.restore(self.optimizer, self.parameters, self.arena.tensors)
        self.step_number = _done(self.arena)

    def _fill(self, newest: Version | None) -> None:
        if newest is None:
            for name, tensor in attach.tensors_of(self.module).items():
                self.arena.tensors[name].copy_(tensor.detach())
            optimizers.adopt(self.optimizer, self.parameters, self.arena.tensors)
            self.arena.tensors[_STEPS].fill_(1)
            return
        found = newest.arena.table.specs()
        attach.check_same(self.arena.table.specs(), found, f"the state in {newest.filename!r}")
        for name, tensor in newest.arena.tensors.items():
            self.arena.tensors[name].copy_(tensor)
        self.arena.tensors[_STEPS].fill_(newest.number + 1)
        self.resumed_from = newest.number

    def discard(self) -> None:
        """Removes the live file of a training that could not begin; versions stay."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.arena.data.filename)

    def step(self, buffers: Mapping[str, torch.Tensor] | None = None) -> None:
        """Makes a step with the gradients that the parameters have.

        Args:
            buffers: New values of the module's buffers, by name.

        Raises:
            UnsupportedTensorError: If the optimizer keeps what it did not before.
        """
        with self._changing():
            self.optimizer.step()
            for name, value in (buffers or {}).items():
                self.arena.tensors[name].copy_(value)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Counts a step, and marks the file as half changed until it is done."""
        steps = self.arena.tensors[_STEPS]
        steps[0] = self.step_number + 2
        yield
        self._adopt()
        steps[1] = self.step_number + 2
        self.step_number += 1

    def _adopt(self) -> None:
        # Some optimizers put a new tensor in the place of the old one.
        for name, p in self.parameters.items():
            place = self.arena.tensors[name]
            if p.data_ptr() != place.data_ptr():
                place.copy_(p.detach())
                p.data = place
        optimizers.adopt(self.optimizer, self.parameters, self.arena.tensors)

    @property
    def module_specs(self) -> Mapping[str, Spec]:
        """The kinds of the module's tensors."""
        return self._module_specs

    def state_dict(self) -> dict[str, Any]:
        """Copies of the module's and the optimizer's state dict, and the number of steps."""
        return {
            "module": {k: v.clone() for k, v in self.module.state_dict().items()},
            "optimizer": _copied(self.optimizer.state_dict()),
            "step": self.step_number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over module and optimizer of what `state_dict` gave, as a step of its own.

        Args:
            state: ``module``: values by name, also those read from a version's file; ties may be
                there once. ``optimizer``: the optimizer's state dict, which may be missing.

        Raises:
            LayoutError: If it is of another module or optimizer; nothing is changed.
        """
        values = self._values_of(state)
        optimizer = _copied(state.get("optimizer"))
        if optimizer is not None:
            optimizers.check_state(self.optimizer, self.parameters, self.arena.tensors, optimizer)
        with self._changing():
            for name in self._module_specs:
                self.arena.tensors[name].copy_(values[name])
            if optimizer is not None:
                self.optimizer.load_state_dict(optimizer)

    def _values_of(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        try:
            given = dict(state["module"])
            values = {n: t for n, t in given.items() if not n.startswith(OPTIMIZER_PREFIX)}
            aliases = self.module.state_dict().keys() - self._module_specs.keys()  # of tied weights
            found = {n: Spec.of(tensor) for n, tensor in values.items() if n not in aliases}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LayoutError(
                f"it is no state of a training: {type(error).__name__}: {error}",
                hint='Give a dict with the values by name under "module".',
            ) from None
        attach.check_same(self._module_specs, found, "the state dict")
        return values


def _open_whole(path: str, specs: Mapping[str, Spec]) -> Arena | None:
    """Opens a live file of this boot in which no step is under way; else None."""
    try:
        arena = Arena.open(path, mode="r+")
    except (PathNotFoundError, LayoutError):
        return None
    if arena.table.metadata.get(_HOST) != host.host_id():
        return None  # what the page cache had may not have reached the disk
    attach.check_same(specs, arena.table.specs(), f"the state in {path!r}")
    begun, done = arena.tensors[_STEPS].tolist()
    return arena if begun == done > 0 else None


def _done(arena: Arena) -> int:
    return int(arena.tensors[_STEPS][1]) - 1


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
