"""What a parameter server does when trainers call: it lets them in, and makes steps of pushes."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mmrpc import rpc
from mmrpc.errors import MmrpcError, PeerLostError, RpcError
from mmrpc.train import attach
from mmrpc.train.gradients import Mean
from mmrpc.train.member import Member, link_for
from mmrpc.train.messages import Consistency, Join, Joined, Parameters, Push, Pushed
from mmrpc.train.rounds import Policy, Rounds
from mmrpc.train.slot import Slot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mmrpc.train.state import TrainingState
    from mmrpc.train.version import Version
    from mmrpc.train.versions import Versions

_log = logging.getLogger("mmrpc.train")
_PROBE_S: Final = 1.0
_PROBE_TIMEOUT_S: Final = 10.0
_SMOOTHING: Final = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is.

    Attributes:
        step: Steps made.
        loss: Mean of the recent losses that trainers told; None if none did.
        staleness: Mean of how many steps recent gradients were behind.
        trainers: Trainers that are there.
        dropped: Gradients that were not used.
    """

    step: int
    loss: float | None
    staleness: float
    trainers: int
    dropped: int


class Coordinator:
    """Takes calls of trainers, each on a thread of its own, and makes one step after another.

    Args:
        state: The training state.
        policy: When a step is made.
        consistency: What trainers of this host map.
        versions: Where versions are published.
        snapshot_every: After how many steps one is published that nobody waits for.
        max_grad_norm: Norm to which gradients are clipped; None for no limit.

    Attributes:
        changed: Held while anything here changes; notified when something has.
        version: The newest published version.
    """

    def __init__(
        self,
        state: TrainingState,
        policy: Policy,
        consistency: Consistency,
        versions: Versions,
        *,
        snapshot_every: int,
        max_grad_norm: float | None,
    ) -> None:
        self.changed = threading.Condition()
        self._state, self._policy, self._consistency = state, policy, consistency
        self._versions, self._snapshot_every = versions, snapshot_every
        self._rounds = Rounds(policy)
        self._mean = Mean(state.parameters, max_grad_norm)
        self._members: dict[str, Member] = {}
        self._joined = 0
        self._is_probing = False
        self._is_closed = False
        self._broken: Exception | None = None
        self._progress = Progress(state.step_number, None, 0.0, 0, 0)
        self.version = self._publish()

    # What trainers call.

    def join(self, join: Join) -> Joined:
        """Lets a trainer in; one of the same name is replaced."""
        with self.changed:
            self._check_open()
            attach.check_same(self._state.module_specs, join.specs, f"the module of {join.trainer}")
            link = link_for(join, self._consistency)
            slot = self._make_slot() if link.gradients == "mapped" else None
            self._joined += 1
            member = Member(join.trainer, self._joined, link, slot)
            parameters = self._parameters(member)
            self._members[join.trainer] = member
            self._rounds.join(join.trainer)
            self._try_step()
            self.changed.notify_all()
            _log.info("trainer %s joined: %s", join.trainer, link)
            memory = slot.data if slot is not None else None
            return Joined(member.incarnation, link, parameters, memory, self._state.sparse)

    def push(self, push: Push) -> Pushed:
        """Takes a gradient, and answers when it is used or dropped."""
        with self.changed:
            self._check_open()
            member = self._member(push.trainer, push.incarnation)
            if member.answered < push.sequence:
                if member.push is None or member.push.sequence < push.sequence:
                    self._offer(member, push)
                while member.answered < push.sequence:  # one that came late is answered too
                    self._check_open()
                    self._member(push.trainer, push.incarnation)
                    if not self.changed.wait(_PROBE_S):
                        self._remove_lost()
                if member.error is not None:
                    error, member.error = member.error, None  # a repeated push may fare better
                    raise error
            return Pushed(member.is_used, member.staleness, self._parameters(member))

    def pull(self, trainer: str, incarnation: int) -> Parameters:
        """Gives the newest parameters."""
        with self.changed:
            self._check_open()
            return self._parameters(self._member(trainer, incarnation))

    def leave(self, trainer: str, incarnation: int) -> None:
        """Lets a trainer go; the others do not wait for it."""
        with self.changed:
            self._remove([(trainer, incarnation)])

    # What the server calls.

    def progress(self) -> Progress:
        """Says how far the training is."""
        with self.changed:
            step, trainers = self._state.step_number, len(self._rounds.members)
            return replace(self._progress, step=step, trainers=trainers)

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until all expected trainers have joined, and all have left or are lost."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while not (self._rounds.has_begun and not self._rounds.members):
                left_s = _PROBE_S if deadline is None else deadline - time.monotonic()
                if left_s <= 0:
                    return False
                if not self.changed.wait(min(left_s, _PROBE_S)) and left_s > _PROBE_S:
                    self._remove_lost()
            return True

    def ensure_published(self) -> None:
        """Publishes the present state, if it is not yet; `changed` is held.

        Raises:
            NoSpaceError: If there is too little space; training can go on.
        """
        self._check_sound()
        if self.version.number != self._state.step_number:
            self.version = self._publish()

    def publish_step(self) -> None:
        """Publishes the state after a step, if somebody waits for that or it is time to."""
        is_time = self._state.step_number % self._snapshot_every == 0
        if is_time or self._publishes_each_step():
            self.ensure_published()

    def close(self) -> None:
        """Takes no more calls; who waits for a step gets an error. `changed` is held.

        Raises:
            NoSpaceError: If the last steps could not be published.
        """
        self._is_closed = True
        self.changed.notify_all()
        if self._broken is None:
            self.ensure_published()

    # Members. Here and below `changed` is held.

    def _check_open(self) -> None:
        self._check_sound()
        if self._is_closed:
            raise MmrpcError("the parameter server was closed")

    def _check_sound(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _member(self, trainer: str, incarnation: int) -> Member:
        member = self._members.get(trainer)
        if member is None or member.incarnation != incarnation:
            why = "is not joined" if member is None else "was replaced by another of its name"
            raise MmrpcError(
                f"trainer {trainer!r} {why}", hint="Make a new Trainer, which joins again."
            )
        return member

    def _make_slot(self) -> Slot:
        specs = self._state.module_specs
        dense = self._state.parameters.keys() - self._state.sparse
        buffers = attach.buffers_of(self._state.module)
        return Slot.create(
            {name: spec for name, spec in specs.items() if name in dense},
            {name: specs[name] for name in buffers},
        )

    def _remove(self, members: Iterable[tuple[str, int]]) -> None:
        for name, incarnation in members:
            member = self._members.get(name)
            if member is None or member.incarnation != incarnation:
                continue  # it has joined again
            self._rounds.leave(name)
            if member.push is None:
                del self._members[name]
        self._try_step()
        self.changed.notify_all()

    def _remove_lost(self) -> None:
        """Calls those who are awaited, to see who is no longer there."""
        if self._is_probing:
            return
        awaited = [self._members[name] for name in sorted(self._rounds.missing)]
        self._is_probing = True
        self.changed.release()
        try:
            lost = [member for member in awaited if not _answers(member.trainer)]
        finally:
            self.changed.acquire()
            self._is_probing = False
        if lost:
            names = ", ".join(member.trainer for member in lost)
            _log.warning("lost %s; training goes on without", names)
            self._remove((member.trainer, member.incarnation) for member in lost)

    # Steps.

    def _offer(self, member: Member, push: Push) -> None:
        staleness = self._state.step_number - push.version
        member.push = push
        if self._policy.is_too_stale(staleness):
            self._settle([member], set(), self._state.step_number, None)
        elif self._policy.update == "sync":
            self._rounds.offer(push.trainer)
            self._try_step()
        else:
            self._use([member])

    def _try_step(self) -> None:
        if self._rounds.is_ready:
            self._use([self._members[name] for name in self._rounds.take()])

    def _use(self, members: list[Member]) -> None:
        """Uses the pushes of these trainers, makes a step if it is due, and answers them."""
        before = self._state.step_number
        used: set[Member] = set()
        error: Exception | None = None
        try:
            whole = self._gather(members)
            used = set(whole)
            if self._mean.count >= self._policy.accumulate:
                self._make_step(whole)
        except Exception as caught:
            error = caught
            self._mean.reset()
            if self._state.step_number == before:  # else it is made, but not published
                used = set()
        self._settle(members, used, before, error)
        for name in self._members.keys() - self._rounds.members:
            if self._members[name].push is None:
                del self._members[name]
        self.changed.notify_all()

    def _gather(self, members: list[Member]) -> list[Member]:
        """Adds up gradients; gives the members whose memory was whole all the time."""
        if self._mean.count:  # those of before are used, and must not be lost by one that is torn
            copies = [(m, g.copied()) for m in members if m.is_whole and (g := m.gradient())]
            copies = [(member, copy) for member, copy in copies if member.is_whole]
            self._mean.add(copy for _, copy in copies)
            return [member for member, _ in copies]
        whole = [member for member in members if member.is_whole]
        while True:
            self._mean.add(g for member in whole if (g := member.gradient()))
            still_whole = [member for member in whole if member.is_whole]
            if len(still_whole) == len(whole):
                return whole
            self._mean.reset()
            whole = still_whole

    def _make_step(self, members: list[Member]) -> None:
        self._mean.finish()
        try:
            # As in data-parallel training, the statistics are those of the first.
            self._state.step(members[0].buffers())
        except Exception as error:
            self._broken = error  # half a step may have been made; the last version is whole
            raise
        self.publish_step()

    def _settle(
        self, members: list[Member], used: set[Member], step: int, error: Exception | None
    ) -> None:
        told = self._progress
        loss, mean, dropped = told.loss, told.staleness, told.dropped
        for member in members:
            if member.push is None:
                continue
            staleness = step - member.push.version
            mean += _SMOOTHING * (staleness - mean)
            dropped += member not in used
            if member.push.loss is not None:
                # One that is not finite shows, and is forgotten with the next.
                before = loss if loss is not None and math.isfinite(loss) else member.push.loss
                loss = before + _SMOOTHING * (member.push.loss - before)
            member.settle(is_used=member in used, staleness=staleness, error=error)
        self._progress = replace(told, loss=loss, staleness=mean, dropped=dropped)

    # Parameters and versions.

    def _parameters(self, member: Member) -> Parameters:
        step = self._state.step_number
        if member.link.parameters == "values":
            tensors = self._state.arena.tensors
            values = {name: tensors[name].clone() for name in self._state.module_specs}
            return Parameters(step, values=values)
        if member.link.parameters == "live":
            is_new = not member.in_use
            member.in_use = (step,)
            return Parameters(step, live=self._state.arena if is_new else None)
        self.ensure_published()
        # It maps the version before until it has this answer.
        member.in_use = (*member.in_use[-1:], self.version.number)
        return Parameters(self.version.number, published=self.version)

    def _publishes_each_step(self) -> bool:
        return self._consistency == "published" or any(
            member.link.parameters == "published" for member in self._members.values()
        )

    def _publish(self) -> Version:
        version = self._versions.publish(self._state.step_number, self._state.arena)
        published = (m for m in self._members.values() if m.link.parameters == "published")
        self._versions.retire({number for member in published for number in member.in_use})
        return version


def _answers(worker: str) -> bool:
    try:
        rpc.rpc_sync(worker, _nothing, timeout=_PROBE_TIMEOUT_S)
    except PeerLostError:
        return False
    except RpcError:  # slow is not lost
        return True
    return True


def _nothing() -> None:
    """Answers."""
