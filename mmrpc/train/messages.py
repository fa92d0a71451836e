"""What trainers and their server tell each other. Mapped tensors in it go by reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from mmrpc.core.tensor import MemoryMappedTensor
    from mmrpc.train.arena import Arena
    from mmrpc.train.table import Spec
    from mmrpc.train.version import Version

Consistency = Literal["live", "published"]
Rows = tuple["torch.Tensor", "torch.Tensor"]
"""Row numbers, int64 [n], and their values [n, ...]."""


@dataclass(frozen=True, slots=True)
class Link:
    """How one trainer and its server are connected.

    Attributes:
        parameters: ``live``: the trainer maps what the server changes. ``published``: it maps
            one immutable version after another. ``values``: they are sent.
        gradients: ``mapped``: the server reads them where backward wrote them. ``values``: they
            are sent.
        reason: Why it is so, as a clause.
    """

    parameters: Literal["live", "published", "values"]
    gradients: Literal["mapped", "values"]
    reason: str

    def __str__(self) -> str:
        return f"parameters {self.parameters}, gradients {self.gradients}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Join:
    """A trainer asks to be let in.

    Attributes:
        trainer: Its name.
        host: `mmrpc.core.system.host.host_id()` of it.
        memory_host: `mmrpc.core.system.host.memory_host_id()` of it.
        specs: The kinds of its module's tensors.
        by_value: Whether it has tried to map and could not.
    """

    trainer: str
    host: str
    memory_host: str
    specs: dict[str, Spec]
    by_value: bool = False


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters at one step, in the way of the trainer's link.

    Attributes:
        version: How many steps were made.
        live: Bytes of the arena that the server changes.
        published: An immutable version.
        values: The tensors themselves, by name.
    """

    version: int
    live: Arena | None = None
    published: Version | None = None
    values: dict[str, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """A trainer was let in.

    Attributes:
        incarnation: Number of this joining; a later one of the same name replaces it.
        link: How it is connected.
        parameters: Where they are.
        slot: Memory for its gradients, if they are mapped.
        sparse: Names of the parameters whose gradients are rows.
    """

    incarnation: int
    link: Link
    parameters: Parameters
    slot: MemoryMappedTensor | None
    sparse: frozenset[str]


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient is ready.

    Attributes:
        trainer: Name of the trainer.
        incarnation: Its joining.
        sequence: Number of this push; a repeated one is answered, but not used again.
        version: The step whose parameters the gradient is for.
        weight: What it counts in the mean, such as the number of samples.
        loss: The loss, to be shown.
        untouched: The parameters that backward gave no gradient.
        rows: Sparse gradients, by parameter.
        dense: Gradients, if they are not in the slot.
        buffers: The module's buffers, if they are not in the slot.
    """

    trainer: str
    incarnation: int
    sequence: int
    version: int
    weight: float = 1.0
    loss: float | None = None
    untouched: frozenset[str] = frozenset()
    rows: dict[str, Rows] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] | None = None
    buffers: dict[str, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of a gradient.

    Attributes:
        is_used: Whether it is in a step, or in the sum for the next one; if not, it was too
            stale, or came from memory that changed while it was read.
        staleness: How many steps were made since the parameters that it was for.
        parameters: The newest.
    """

    is_used: bool
    staleness: int
    parameters: Parameters
