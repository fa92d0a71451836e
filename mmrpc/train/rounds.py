"""Which pushes make a step together: all, a quorum, or each on its own. Pure.

Nothing here knows tensors, calls or clocks, so that every order of events can be tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mmrpc.errors import ConfigError
from mmrpc.train import arguments

Update = Literal["sync", "async"]


@dataclass(frozen=True, slots=True)
class Policy:
    """When a step is made.

    Attributes:
        update: ``sync``: trainers wait for one another, and their gradients are averaged.
            ``async``: each push is used at once.
        trainers: How many trainers have to join before the first step in sync.
        quorum: How many pushes make a step in sync; None for one of each trainer that is there.
        accumulate: How many pushes make a step in async.
        max_staleness: How many steps a gradient may be behind; older ones are dropped. None for
            no limit. In sync with a quorum it defaults to 0: who comes too late is dropped.

    Raises:
        ConfigError: If a value cannot be, or the values do not go together.
    """

    update: Update = "sync"
    trainers: int = 1
    quorum: int | None = None
    accumulate: int = 1
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        arguments.one_of("update", self.update, ("sync", "async"))
        arguments.whole_number("trainers", self.trainers, 1)
        arguments.whole_number("accumulate", self.accumulate, 1)
        if self.max_staleness is not None:
            arguments.whole_number("max_staleness", self.max_staleness, 0)
        if self.quorum is not None:
            arguments.whole_number("quorum", self.quorum, 1)
            if self.quorum > self.trainers:
                raise ConfigError(
                    f"{self.quorum} are more than the trainers, which are {self.trainers}",
                    key="quorum",
                )
            if self.update == "async":
                raise ConfigError(
                    "it is for sync", key="quorum", hint="In async, say how many to accumulate."
                )
        if self.update == "sync" and self.accumulate != 1:
            raise ConfigError(
                "it is for async",
                key="accumulate",
                hint="In sync, call backward more than once before a step.",
            )

    @property
    def staleness_limit(self) -> int | None:
        """The limit that holds, with the default of a quorum."""
        if self.max_staleness is None and self.quorum is not None:
            return 0
        return self.max_staleness

    def is_too_stale(self, staleness: int) -> bool:
        """Whether a gradient that is so many steps behind is dropped."""
        limit = self.staleness_limit
        return limit is not None and staleness > limit


@dataclass
class Rounds:
    """Who is there, and who waits for the next step.

    Attributes:
        policy: See `Policy`.
        members: The trainers that are there.
        waiting: Those whose gradients wait for the next step in sync.
        seen: All that have ever joined.
    """

    policy: Policy
    members: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)

    def join(self, trainer: str) -> None:
        """Takes in a trainer; if it was there before, what it had pushed is forgotten."""
        self.members.add(trainer)
        self.waiting.discard(trainer)
        self.seen.add(trainer)

    def leave(self, trainer: str) -> None:
        """Lets a trainer go. What it has pushed whole stays: its gradient is good."""
        self.members.discard(trainer)

    def offer(self, trainer: str) -> None:
        """Takes a push in sync."""
        self.waiting.add(trainer)

    @property
    def has_begun(self) -> bool:
        """Whether so many trainers have joined as the policy waits for."""
        return len(self.seen) >= self.policy.trainers

    @property
    def missing(self) -> set[str]:
        """The trainers without which the next step in sync is not made."""
        return self.members - self.waiting

    @property
    def is_ready(self) -> bool:
        """Whether the next step in sync can be made."""
        if not self.has_begun or not self.waiting:
            return False
        if self.policy.quorum is not None and len(self.waiting) >= self.policy.quorum:
            return True
        return not self.missing

    def take(self) -> list[str]:
        """Gives those whose gradients make the step, in a fixed order, and begins a new round."""
        taken = sorted(self.waiting)
        self.waiting.clear()
        return taken
