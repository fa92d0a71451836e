"""The memory into which a trainer's backward writes, and from which the server reads.

It says itself which push it holds: a trainer marks it before it begins to write and once all
is there. What was half written when a trainer was killed is so never taken for a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from mmrpc.train.arena import Arena
from mmrpc.train.table import Spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mmrpc.core.tensor import MemoryMappedTensor

_SEQUENCE: Final = "#sequence"
_GRADIENT: Final = "gradient/"
_BUFFER: Final = "buffer/"


class Slot:
    """Gradients and buffers of one trainer in anonymous shared memory.

    Args:
        arena: Its memory, from `create` or from the other process.

    Attributes:
        gradients: The dense gradients by parameter.
        buffers: The module's buffers.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._sequence = arena.tensors[_SEQUENCE]
        self.gradients = self._part(_GRADIENT)
        self.buffers = self._part(_BUFFER)

    @classmethod
    def create(cls, gradients: Mapping[str, Spec], buffers: Mapping[str, Spec]) -> Slot:
        """Makes a slot; its memory is freed when the last process that maps it has ended.

        Raises:
            NoSpaceError: If there is too little memory.
        """
        specs = {_SEQUENCE: Spec(torch.int64, (2,))}
        specs |= {_GRADIENT + name: spec for name, spec in gradients.items()}
        specs |= {_BUFFER + name: spec for name, spec in buffers.items()}
        return cls(Arena.create(specs, filename=None))

    @property
    def data(self) -> MemoryMappedTensor:
        """Its bytes, to be sent."""
        return self._arena.data

    def begin(self, sequence: int) -> None:
        """Marks it as being written for a push."""
        self._sequence[0] = sequence

    def complete(self, sequence: int) -> None:
        """Marks it as whole."""
        self._sequence[1] = sequence

    def holds(self, sequence: int) -> bool:
        """Whether it holds that push, whole, and nothing has been written for another."""
        return self._sequence.tolist() == [sequence, sequence]

    def _part(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self._arena.tensors.items()
            if name.startswith(prefix)
        }
