"""What a trainer gives: the gradients that backward leaves, and the module's buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mmrpc.errors import LayoutError
from mmrpc.train import attach
from mmrpc.train.rows import RowMemory
from mmrpc.train.table import Spec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import nn

    from mmrpc.train.messages import Rows
    from mmrpc.train.slot import Slot


class Contents(NamedTuple):
    """What is in an outbox, as a push tells it.

    Attributes:
        untouched: The parameters that have no gradient.
        rows: Sparse gradients, by parameter.
        dense: Dense ones, if there is no slot that has them.
        buffers: The module's buffers, if there is no slot that has them.
    """

    untouched: frozenset[str]
    rows: dict[str, Rows]
    dense: dict[str, torch.Tensor] | None
    buffers: dict[str, torch.Tensor] | None


class Outbox:
    """Gradients and buffers of a module, in a slot if there is one.

    Args:
        module: The module; its parameters have been pointed to the server's.
        slot: Memory that the server reads; None if all is sent.
        sparse: Names of the parameters whose gradients are rows.

    Attributes:
        is_touched: Whether backward has given a gradient since the last `begin` or `complete`.
    """

    def __init__(self, module: nn.Module, slot: Slot | None, sparse: Collection[str]) -> None:
        self._module, self._slot, self._sparse = module, slot, sparse
        self._parameters = attach.trained(module)
        self._buffer_specs = {n: Spec.of(b) for n, b in attach.buffers_of(module).items()}
        self._rows: dict[str, RowMemory] = {}
        self._touched: set[str] = set()
        self._addresses: dict[str, int] = {}
        self._own_buffers()
        self.remember_places()
        self._hooks = [self._watch(name, p) for name, p in self._parameters.items()]

    def _watch(self, name: str, parameter: Any) -> Any:
        """Notes that backward gave a parameter a gradient: the slot cannot tell from zeros."""
        return parameter.register_post_accumulate_grad_hook(lambda _: self._touched.add(name))

    def _own_buffers(self) -> None:
        """Moves the buffers, which start with the server's values, to memory of this trainer."""
        for name, buffer in self.buffers().items():
            if self._slot is None:
                buffer.data = buffer.detach().clone()
            else:
                self._slot.buffers[name].copy_(buffer)
                buffer.data = self._slot.buffers[name]

    @property
    def is_touched(self) -> bool:
        """See the class."""
        return bool(self._touched)

    def begin(self, sequence: int) -> None:
        """Points the gradients to the slot, cleared, for the push of that number."""
        self._touched.clear()
        slot = self._slot
        if slot is None:
            self.detach()
            return
        slot.begin(sequence)
        if slot.gradients:
            torch._foreach_zero_(list(slot.gradients.values()))
        for name, p in self._parameters.items():
            p.grad = slot.gradients.get(name)

    def detach(self) -> None:
        """Lets backward write elsewhere."""
        for p in self._parameters.values():
            p.grad = None

    def complete(self, sequence: int) -> Contents:
        """Gathers the gradients of a push, and marks the slot as whole."""
        slot = self._slot
        if slot is None:
            contents = self.contents()
            self._touched.clear()
            return contents
        slot.begin(sequence)
        self._gather_in(slot)
        contents = self.contents()
        self._touched.clear()
        slot.complete(sequence)
        return contents

    def _gather_in(self, slot: Slot) -> None:
        """Copies what is not in the slot already: where gradients were set to None, or replaced."""
        for name, place in slot.gradients.items():
            gradient = self._parameters[name].grad
            if gradient is not None and gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                self._touched.add(name)
        buffers = self.buffers()
        for name, place in slot.buffers.items():
            if buffers[name].data_ptr() != place.data_ptr():
                place.copy_(buffers[name])

    def contents(self) -> Contents:
        """What there is now."""
        rows: dict[str, Rows] = {}
        dense: dict[str, torch.Tensor] = {}
        for name, p in self._parameters.items():
            if p.grad is None:
                continue
            if name in self._sparse:
                rows[name] = self._rows_of(name, p.grad)
            elif self._slot is None:
                dense[name] = p.grad.to_dense() if p.grad.is_sparse else p.grad
        untouched = self._parameters.keys() - self._touched - rows.keys() - dense.keys()
        if self._slot is not None:
            return Contents(frozenset(untouched), rows, None, None)
        return Contents(frozenset(untouched), rows, dense, dict(self.buffers()))

    def _rows_of(self, name: str, gradient: torch.Tensor) -> Rows:
        if not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        gradient = gradient.coalesce()
        numbers, values = gradient.indices()[0], gradient.values()
        if self._slot is None:
            return numbers, values
        memory = self._rows.setdefault(name, RowMemory(values.dtype, values.shape[1:]))
        return memory.write(numbers, values)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The module's buffers, which are each trainer's own."""
        return attach.buffers_of(self._module) if self._buffer_specs else {}

    def remember_places(self) -> None:
        """Takes note of where the parameters are, after they were pointed elsewhere."""
        self._addresses = {name: p.data_ptr() for name, p in self._parameters.items()}

    def check_module(self) -> None:
        """Refuses a module whose parameters are others now: they would not be trained.

        Raises:
            LayoutError: Naming the first.
        """
        problem = self._change()
        if problem is not None:
            raise LayoutError(
                f"since the module has joined, {problem}",
                hint="Change the module before, or close this trainer and make a new one.",
            )

    def _change(self) -> str | None:
        now = attach.trained(self._module)
        for name, p in self._parameters.items():
            if now.get(name) is not p:
                return f"its parameter {name!r} was replaced, removed or frozen"
            if p.data_ptr() != self._addresses[name]:
                return f"its parameter {name!r} was moved to other memory"
        for name in now.keys() - self._parameters.keys():
            return f"its parameter {name!r} has come, or requires gradients"
        buffers = self.buffers()
        for name, spec in self._buffer_specs.items():
            if name not in buffers or Spec.of(buffers[name]) != spec:
                return f"its buffer {name!r} is no longer {spec}"
        return None

    def stop(self) -> None:
        """Lets go of the module."""
        for hook in self._hooks:
            hook.remove()
        self.detach()
