"""`ParameterServer`: holds a training state that trainers map, and makes its steps."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from mmrpc import rpc
from mmrpc.core import host
from mmrpc.core.creation import absolute_path
from mmrpc.errors import MmrpcError, PeerLostError, RpcError
from mmrpc.train import attach, registry
from mmrpc.train.gradients import Mean
from mmrpc.train.messages import Consistency, Join, Joined, Link, Parameters, Push, Pushed
from mmrpc.train.rounds import Policy, Rounds, Update
from mmrpc.train.slot import Slot
from mmrpc.train.state import TrainingState
from mmrpc.train.versions import Version, Versions

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    import torch
    from torch import nn

    from mmrpc.train.optimizers import Factory

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


@dataclass
class _Member:
    """A trainer that has joined."""

    incarnation: int
    link: Link
    slot: Slot | None
    push: Push | None = None
    answered: int = 0
    is_used: bool = False
    staleness: int = 0
    error: Exception | None = None
    in_use: tuple[int, ...] = ()


class ParameterServer:
    """Holds parameters and optimizer state in one mapped file, and makes the optimizer's steps.

    Make it on a worker of the RPC group; trainers then join it with `Trainer`. The module's
    parameters become views of the file. A server that is started again on the same directory
    goes on from what is there.

    Args:
        module: The module. Its parameters stay the same objects.
        optimizer: What makes an optimizer of an iterable of parameters, or one that was made
            for the module's.
        directory: Where the state and its versions are. The files belong to the server, and stay
            when it closes. Trainers on other hosts need it in a mount.
        update: ``sync``: a step is made of the weighted mean of the trainers' gradients, which
            wait for each other. ``async``: each gradient makes a step at once.
        trainers: How many trainers sync waits for before its first step.
        quorum: How many gradients make a step in sync; those that come later are dropped.
        accumulate: How many gradients make a step in async.
        max_staleness: How many steps a gradient may be behind; see `rounds.Policy`.
        consistency: ``live``: trainers of this host map what the server changes in place; with
            a quorum or in async they may read it half changed. ``published``: they map
            immutable versions, one for each step. Trainers of other hosts always do.
        max_grad_norm: Norm to which gradients are clipped before a step.
        snapshot_every: In ``live``, after how many steps a version is published.
        keep: How many of the newest versions stay.
        durable: Whether a version is on the device before it is announced.
        resume: Whether to go on from what is in the directory.
        name: Name under which trainers find it on this worker.

    Raises:
        PathExistsError: If `resume` is false and the directory has a state.
        LayoutError: If the state there is of another module or optimizer.
        UnsupportedTensorError: If module or optimizer have what cannot be mapped.
        NoSpaceError: If there is too little space.
        ValueError: If the arguments do not go together.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Factory | torch.optim.Optimizer,
        directory: str | os.PathLike[str],
        *,
        update: Update = "sync",
        trainers: int = 1,
        quorum: int | None = None,
        accumulate: int = 1,
        max_staleness: int | None = None,
        consistency: Consistency = "live",
        max_grad_norm: float | None = None,
        snapshot_every: int = 100,
        keep: int = 3,
        durable: bool = True,
        resume: bool = True,
        name: str = "parameters",
    ) -> None:
        if consistency not in ("live", "published"):
            raise ValueError(f'consistency must be "live" or "published", not {consistency!r}')
        if snapshot_every < 1:
            raise ValueError(f"snapshot_every must be at least 1, not {snapshot_every}")
        self.name = name
        self.directory = absolute_path(directory)
        self._policy = Policy(update, trainers, quorum, accumulate, max_staleness)
        self._consistency = consistency
        self._snapshot_every = snapshot_every
        self._rounds = Rounds(self._policy)
        self._members: dict[str, _Member] = {}
        self._joined = 0
        self._changed = threading.Condition()
        self._is_probing = False
        self._broken: Exception | None = None
        self._losses: float | None = None
        self._staleness = 0.0
        self._dropped = 0
        self._versions = Versions(self.directory, keep=keep, durable=durable)
        self._lock = registry.lock(self.directory)
        try:
            self._state = TrainingState(
                module,
                optimizer,
                self.directory,
                self._versions,
                resume=resume,
                trust_live=consistency == "live",
            )
            self._mean = Mean(self._state.parameters, max_grad_norm)
            self._version = self._publish()
            registry.serve(name, self)
        except BaseException:
            self._lock.release()
            raise
        if self.resumed_from is not None:
            _log.info("parameter server %r goes on from step %d", name, self.resumed_from)

    @property
    def module(self) -> nn.Module:
        """The module, whose parameters are the newest."""
        return self._state.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; change its learning rate between steps, inside `paused`."""
        return self._state.optimizer

    @property
    def step_number(self) -> int:
        """How many steps were made."""
        return self._state.step_number

    @property
    def resumed_from(self) -> int | None:
        """The step that it went on from; None if the directory was empty."""
        return self._state.resumed_from

    @property
    def version(self) -> Version:
        """The newest published version."""
        return self._version

    def progress(self) -> Progress:
        """Says how far the training is."""
        with self._changed:
            return Progress(
                self.step_number,
                self._losses,
                self._staleness,
                len(self._rounds.members),
                self._dropped,
            )

    def paused(self) -> threading.Condition:
        """A context manager in which no step is made, to read or change state consistently."""
        return self._changed

    def checkpoint(self) -> Version:
        """Publishes the present state, if it is not yet, and gives that version.

        A reference to it (``checkpoint().ref().to_json()``) is all that has to be kept; old
        versions are deleted in time, so copy the file of one that is to stay.

        Raises:
            NoSpaceError: If there is too little space; training can go on.
        """
        with self._changed:
            self._ensure_published()
            return self._version

    def state_dict(self) -> dict[str, Any]:
        """Copies of the module's and the optimizer's state dict, and the number of steps."""
        with self._changed:
            return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the module and optimizer of what `state_dict` gave, as a step of its own.

        Raises:
            LayoutError: If it is of another module.
        """
        with self._changed:
            self._state.load_state_dict(state)
            self._publish_step()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until as many trainers as expected have joined, and all have left.

        Returns:
            Whether that happened in time.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._rounds.has_begun and not self._rounds.members, timeout_s
            )

    def close(self) -> None:
        """Publishes the present state and serves no more; who waits for a step gets an error."""
        with self._changed:
            if self._broken is not None and not self._lock.is_locked:
                return
            registry.withdraw(self.name, self)
            try:
                if self._broken is None:
                    self._ensure_published()
            finally:
                self._broken = self._broken or MmrpcError("the parameter server was closed")
                self._lock.release()
                self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What trainers call.

    def join(self, join: Join) -> Joined:
        """Lets a trainer in; one of the same name is replaced."""
        with self._changed:
            self._check_sound()
            attach.check_same(self._state.module_specs, join.specs, f"the module of {join.trainer}")
            link = self._link(join)
            slot = self._make_slot() if link.gradients == "mapped" else None
            self._joined += 1
            member = _Member(self._joined, link, slot)
            parameters = self._parameters(member)
            before = self._members.get(join.trainer)
            self._members[join.trainer] = member
            self._rounds.join(join.trainer)
            if before is not None:
                before.push = None
            self._try_step()
            self._changed.notify_all()
            _log.info("trainer %s joined: %s", join.trainer, link)
            return Joined(
                member.incarnation,
                link,
                parameters,
                slot.data if slot else None,
                self._state.sparse,
            )

    def push(self, push: Push) -> Pushed:
        """Takes a gradient, and answers when it is used or dropped."""
        with self._changed:
            member = self._member(push.trainer, push.incarnation)
            self._check_sound()
            if member.answered == push.sequence:
                return self._answer(member)
            if member.push is None or member.push.sequence != push.sequence:
                self._offer(member, push)
            while member.answered != push.sequence:
                self._wait_for_others(member)
            if member.error is not None:
                error, member.error = member.error, None  # a repeated push may fare better
                raise error
            return self._answer(member)

    def pull(self, trainer: str, incarnation: int) -> Parameters:
        """Gives the newest parameters."""
        with self._changed:
            return self._parameters(self._member(trainer, incarnation))

    def leave(self, trainer: str, incarnation: int) -> None:
        """Lets a trainer go; the others do not wait for it."""
        with self._changed:
            member = self._members.get(trainer)
            if member is not None and member.incarnation == incarnation:
                self._remove([trainer])

    # With the lock held.

    def _check_sound(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _member(self, trainer: str, incarnation: int) -> _Member:
        member = self._members.get(trainer)
        if member is None or member.incarnation != incarnation:
            why = "is not joined" if member is None else "was replaced by another of its name"
            raise MmrpcError(
                f"trainer {trainer!r} {why}", hint="Make a new Trainer, which joins again."
            )
        return member

    def _link(self, join: Join) -> Link:
        if join.by_value:
            return Link("values", "values", "it cannot map the server's files")
        if join.host != host.host_id():
            return Link("published", "values", "it is on another host")
        if join.memory_host != host.memory_host_id():
            return Link(self._consistency, "values", "it is in another PID namespace")
        return Link(self._consistency, "mapped", "it is on the same host")

    def _make_slot(self) -> Slot:
        specs = self._state.module_specs
        dense = self._state.parameters.keys() - self._state.sparse
        buffers = attach.buffers_of(self.module)
        return Slot.create(
            {name: spec for name, spec in specs.items() if name in dense},
            {name: specs[name] for name in buffers},
        )

    def _offer(self, member: _Member, push: Push) -> None:
        staleness = self.step_number - push.version
        if self._policy.is_too_stale(staleness):
            self._dropped += 1
            member.answered, member.is_used, member.staleness = push.sequence, False, staleness
            return
        member.push = push
        if self._policy.update == "sync":
            self._rounds.offer(push.trainer)
            self._try_step()
        else:
            self._use([push.trainer])

    def _try_step(self) -> None:
        if self._rounds.is_ready:
            self._use(self._rounds.take())

    def _use(self, names: list[str]) -> None:
        """Uses the pushes of these trainers, makes a step if it is due, and answers them."""
        members = [self._members[name] for name in names]
        step = self.step_number
        used: set[str] = set()
        error: Exception | None = None
        try:
            used = self._gather(members)
            if self._mean.count >= self._policy.accumulate:
                self._make_step(members)
        except Exception as caught:
            error = caught
            self._mean.reset()
            used = used if self.step_number > step else set()  # made, but not published
        for member in members:
            self._settle(member, step, used, error)
        for name in self._members.keys() - self._rounds.members - self._rounds.waiting:
            del self._members[name]
        self._changed.notify_all()

    def _settle(self, member: _Member, step: int, used: set[str], error: Exception | None) -> None:
        push = member.push
        if push is None:
            return
        member.push, member.answered, member.error = None, push.sequence, error
        member.is_used, member.staleness = push.trainer in used, step - push.version
        self._dropped += not member.is_used
        self._staleness += _SMOOTHING * (member.staleness - self._staleness)
        if push.loss is not None:
            before = push.loss if self._losses is None else self._losses
            self._losses = before + _SMOOTHING * (push.loss - before)

    def _gather(self, members: Iterable[_Member]) -> set[str]:
        """Adds up gradients; gives the names of those whose memory was whole all the time."""
        whole = [member for member in members if self._is_whole(member)]
        while True:
            for member in whole:
                self._add(member)
            torn = [member for member in whole if not self._is_whole(member)]
            if not torn:
                return {member.push.trainer for member in whole if member.push}
            self._mean.reset()
            whole = [member for member in whole if member not in torn]

    @staticmethod
    def _is_whole(member: _Member) -> bool:
        push = member.push
        return push is not None and (member.slot is None or member.slot.holds(push.sequence))

    def _add(self, member: _Member) -> None:
        push = member.push
        if push is None:
            return
        dense = push.dense if member.slot is None else member.slot.gradients
        used = {n: g for n, g in (dense or {}).items() if n not in push.untouched}
        self._mean.add(used, push.rows, push.weight)

    def _make_step(self, members: list[_Member]) -> None:
        if not self._mean.count:
            return
        self._mean.finish()
        try:
            self._state.step()
        except Exception as error:
            self._broken = error  # half a step may have been made; the last version is whole
            raise
        first = members[0]
        buffers = first.slot.buffers if first.slot else first.push and first.push.buffers
        for name, value in (buffers or {}).items():
            self._state.arena.tensors[name].copy_(value)
        self._publish_step()

    def _answer(self, member: _Member) -> Pushed:
        return Pushed(member.is_used, member.staleness, self._parameters(member))

    def _parameters(self, member: _Member) -> Parameters:
        if member.link.parameters == "values":
            tensors = self._state.arena.tensors
            values = {name: tensors[name].clone() for name in self._state.module_specs}
            return Parameters(self.step_number, values=values)
        if member.link.parameters == "live":
            is_new = not member.in_use
            member.in_use = (self.step_number,)
            return Parameters(self.step_number, live=self._state.arena if is_new else None)
        self._ensure_published()
        # It maps the version before until it has this answer.
        member.in_use = (*member.in_use[-1:], self._version.number)
        return Parameters(self._version.number, published=self._version)

    # Versions.

    @property
    def _publishes_each_step(self) -> bool:
        return self._consistency == "published" or any(
            member.link.parameters == "published" for member in self._members.values()
        )

    def _publish_step(self) -> None:
        if self._publishes_each_step or self.step_number % self._snapshot_every == 0:
            self._ensure_published()

    def _ensure_published(self) -> None:
        if self._version.number != self.step_number:
            self._version = self._publish()

    def _publish(self) -> Version:
        version = self._versions.publish(self.step_number, self._state.arena, {})
        published = (m for m in self._members.values() if m.link.parameters == "published")
        self._versions.retire({number for member in published for number in member.in_use})
        return version

    # Those that are lost.

    def _wait_for_others(self, member: _Member) -> None:
        self._check_sound()
        if self._changed.wait(_PROBE_S) or self._is_probing:
            return
        missing = sorted(self._rounds.missing)
        self._is_probing = True
        self._changed.release()
        try:
            lost = [name for name in missing if not _answers(name)]
        finally:
            self._changed.acquire()
            self._is_probing = False
        if lost:
            _log.warning("lost %s; training goes on without", ", ".join(lost))
            self._remove(lost)

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self._rounds.leave(name)
            if name not in self._rounds.waiting:
                self._members.pop(name, None)
        self._try_step()
        self._changed.notify_all()


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
