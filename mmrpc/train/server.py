"""`ParameterServer`: a training state that trainers map."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Self

from mmrpc.train import arguments, attach, locking, registry
from mmrpc.train.coordinator import Coordinator, Progress
from mmrpc.train.rounds import Policy, Update
from mmrpc.train.state import TrainingState
from mmrpc.train.versions import Versions

if TYPE_CHECKING:
    import os
    import threading

    import torch
    from torch import nn

    from mmrpc.train.messages import Consistency
    from mmrpc.train.optimizers import Factory
    from mmrpc.train.version import Version

_log = logging.getLogger("mmrpc.train")


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

    Attributes:
        directory: Its absolute path.
        name: See ``Args``.

    Raises:
        ConfigError: If an argument cannot be, or the arguments do not go together.
        PathExistsError: If `resume` is false and the directory has a state, or another server or
            publisher writes there.
        PathError: If the directory cannot be used.
        LayoutError: If the state there is of another module or optimizer.
        UnsupportedTensorError: If module or optimizer have what cannot be mapped.
        NoSpaceError: If there is too little space.
        MmrpcError: If this worker has a server of that name.
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
        arguments.one_of("consistency", consistency, ("live", "published"))
        arguments.whole_number("snapshot_every", snapshot_every, 1)
        arguments.one_of("resume", resume, (True, False))
        if max_grad_norm is not None:
            max_grad_norm = arguments.positive("max_grad_norm", max_grad_norm)
        policy = Policy(update, trainers, quorum, accumulate, max_staleness)
        attach.specs_of(module)
        self.name = arguments.text("name", name)
        registry.check_free(name)
        versions = Versions(directory, keep=keep, durable=durable)
        self.directory = versions.directory
        self._lock = locking.lock(self.directory)
        try:
            self._state = TrainingState(
                module,
                optimizer,
                self.directory,
                versions,
                resume=resume,
                trust_live=consistency == "live",
            )
            try:
                self._coordinator = Coordinator(
                    self._state,
                    policy,
                    consistency,
                    versions,
                    snapshot_every=snapshot_every,
                    max_grad_norm=max_grad_norm,
                )
                registry.serve(name, self._coordinator)
            except BaseException:
                if self.resumed_from is None:
                    self._state.discard()
                raise
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
        return self._coordinator.version

    def progress(self) -> Progress:
        """Says how far the training is."""
        return self._coordinator.progress()

    def paused(self) -> threading.Condition:
        """A context manager in which no step is made, to read or change state consistently."""
        return self._coordinator.changed

    def checkpoint(self) -> Version:
        """Publishes the present state, if it is not yet, and gives that version.

        A reference to it (``checkpoint().ref().to_json()``) is all that has to be kept; old
        versions are deleted in time, so copy the file of one that is to stay.

        Raises:
            NoSpaceError: If there is too little space; training can go on.
        """
        with self.paused():
            self._coordinator.ensure_published()
            return self._coordinator.version

    def state_dict(self) -> dict[str, Any]:
        """Copies of the module's and the optimizer's state dict, and the number of steps."""
        with self.paused():
            return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the module and optimizer of what `state_dict` gave, as a step of its own.

        Args:
            state: ``module``: values by name, also as ``safetensors.torch.load_file`` reads them
                from a version. ``optimizer``: the optimizer's state dict, which may be missing.

        Raises:
            LayoutError: If it is of another module or optimizer; nothing is changed.
        """
        with self.paused():
            self._state.load_state_dict(state)
            self._coordinator.publish_step()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until as many trainers as expected have joined, and all have left or are lost.

        Returns:
            Whether that happened in time.

        Raises:
            ConfigError: If the time cannot be.
        """
        if timeout_s is not None:
            arguments.seconds("timeout_s", timeout_s)
        return self._coordinator.wait(timeout_s)

    def close(self) -> None:
        """Publishes the present state and serves no more; who waits for a step gets an error.

        Raises:
            NoSpaceError: If the last steps could not be published; in ``live`` they are kept.
        """
        if not self._lock.is_locked:
            return
        registry.withdraw(self.name, self._coordinator)
        try:
            with self.paused():
                self._coordinator.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
