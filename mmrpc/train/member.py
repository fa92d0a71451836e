"""A trainer as its server knows it: how it is connected, and the gradient that it has given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmrpc.core.system import host
from mmrpc.train.gradients import Gradient
from mmrpc.train.messages import Consistency, Join, Link, Push

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from mmrpc.train.slot import Slot


@dataclass(eq=False)
class Member:
    """A trainer that has joined.

    Attributes:
        trainer: Its name.
        incarnation: Number of its joining.
        link: How it is connected.
        slot: Where its gradients are; None if they are sent.
        push: The gradient that waits to be used; None if there is none.
        answered: Number of the last push that was used or dropped.
        is_used: Whether that one was used.
        staleness: How many steps that one was behind.
        error: What went wrong with it.
        in_use: Numbers of the published versions that it may map.
    """

    trainer: str
    incarnation: int
    link: Link
    slot: Slot | None
    push: Push | None = None
    answered: int = 0
    is_used: bool = False
    staleness: int = 0
    error: Exception | None = None
    in_use: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it has given a gradient, and its memory holds that one and no other."""
        push = self.push
        return push is not None and (self.slot is None or self.slot.holds(push.sequence))

    def gradient(self) -> Gradient | None:
        """What it has given, where it is; None if nothing waits to be used."""
        if self.push is None:
            return None
        found = self.push.dense if self.slot is None else self.slot.gradients
        dense = {n: g for n, g in (found or {}).items() if n not in self.push.untouched}
        return Gradient(dense, self.push.rows, self.push.weight)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Its module's buffers."""
        if self.slot is not None:
            return self.slot.buffers
        return self.push.buffers or {} if self.push is not None else {}

    def settle(self, *, is_used: bool, staleness: int, error: Exception | None) -> None:
        """Notes what became of its gradient."""
        if self.push is None:
            return
        self.answered, self.push = self.push.sequence, None
        self.is_used, self.staleness, self.error = is_used, staleness, error


def link_for(join: Join, consistency: Consistency) -> Link:
    """Chooses how a trainer is connected, and says why.

    Args:
        join: Who asks.
        consistency: What the server gives the trainers of its host.
    """
    if join.by_value:
        return Link("values", "values", "it cannot map the server's files")
    if join.host != host.host_id():
        return Link("published", "values", "it is on another host")
    if join.memory_host != host.memory_host_id():
        return Link(consistency, "values", "it is in another PID namespace")
    return Link(consistency, "mapped", "it is on the same host")
