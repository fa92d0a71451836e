"""`Trainer`: a module whose parameters are a server's, and whose backward writes where it reads."""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any, Final, Self

from mmrpc import rpc
from mmrpc.core.system import host
from mmrpc.errors import MmrpcError, PathError
from mmrpc.train import arguments, attach, registry
from mmrpc.train.arena import Arena
from mmrpc.train.messages import Join, Joined, Link, Parameters, Push, Pushed
from mmrpc.train.outbox import Contents, Outbox
from mmrpc.train.slot import Slot

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

_log = logging.getLogger("mmrpc.train")
_UNSET: Final = -1.0
_LONGEST_S: Final = 1e6  # of a call; torch counts in milliseconds
_PATIENCE: Final = 0.8  # of the timeout: the server is to say that it is not there


class Trainer:
    """Trains a module whose parameters a `ParameterServer` holds.

    The module's parameters become views of the server's memory, and their gradients views of
    memory that the server reads, so that neither is sent. A training loop is as usual, without an
    optimizer of its own:

        with Trainer(module, "ps0") as trainer:
            for x, y in batches:
                loss_fn(module(x), y).backward()
                trainer.step()

    Gradients of several `backward` calls before a `step` add up.

    Args:
        module: A module of the same kind as the server's, on the CPU. Its values are replaced.
        server: Name of the server's worker in the RPC group.
        name: Name of the server on that worker.
        by_value: Whether to send parameters and gradients instead of mapping them. It is done
            without being asked where nothing can be mapped; `link` says so.
        timeout_s: Seconds to wait for a step, 0 for no limit; by default that of `init_rpc`.
        join_timeout_s: Seconds to wait for the server to be made; 0 if it is there already.

    Attributes:
        module: The module, whose parameters are the server's.
        link: Which way parameters and gradients go, and why.

    Raises:
        ConfigError: If an argument cannot be.
        UnsupportedTensorError: If the module has tensors that cannot be mapped.
        LayoutError: If the module differs from the server's.
        MmrpcError: If there is no such server.
        RpcError: If the worker cannot be reached.
    """

    def __init__(
        self,
        module: nn.Module,
        server: str,
        *,
        name: str = "parameters",
        by_value: bool = False,
        timeout_s: float | None = None,
        join_timeout_s: float = 60.0,
    ) -> None:
        specs = attach.specs_of(module)
        arguments.text("server", server)
        arguments.text("name", name)
        arguments.one_of("by_value", by_value, (True, False))
        join_timeout_s = min(arguments.seconds("join_timeout_s", join_timeout_s), _LONGEST_S)
        self._timeout_s = _UNSET
        if timeout_s is not None and arguments.seconds("timeout_s", timeout_s) < _LONGEST_S:
            self._timeout_s = timeout_s
        elif timeout_s is not None:
            self._timeout_s = 0.0  # no limit
        self.module = module
        self._server, self._name = server, name
        self._worker: str = rpc.get_worker_info().name
        self._pid = os.getpid()
        self._is_closed = False
        self._outbox: Outbox | None = None
        self._sequence = 0
        self._unanswered: Push | None = None
        joined = self._join(specs, by_value, join_timeout_s)
        self._incarnation = joined.incarnation
        self.link: Link = joined.link
        _log.info("joined %s: %s", server, self.link)
        self._take(joined.parameters)
        slot = None if joined.slot is None else Slot(Arena(joined.slot))
        self._outbox = Outbox(module, slot, joined.sparse)
        self._begin()
        _trainers.add(self)

    def _join(self, specs: dict[str, Any], by_value: bool, timeout_s: float) -> Joined:
        join = Join(self._worker, host.host_id(), host.memory_host_id(), specs, by_value)
        try:
            return self._call(  # type: ignore[no-any-return]
                "join", join, wait_s=timeout_s * _PATIENCE, timeout_s=timeout_s or _UNSET
            )
        except PathError as error:
            if by_value:
                raise
            # The server's files or memory are not reachable from here after all.
            _log.warning("parameters and gradients will be sent, not mapped: %s", error)
            return self._join(specs, True, timeout_s)

    @property
    def version(self) -> int:
        """How many steps were made when the parameters were taken."""
        return self._version

    def step(self, *, loss: float | None = None, weight: float = 1.0) -> Pushed:
        """Gives the gradients to the server, waits until they are used, and takes the parameters.

        If it raises, the gradients are not lost: call it again, without another `backward`, to
        repeat the push; it is never used twice.

        Args:
            loss: The loss, for the server's `progress`.
            weight: What these gradients count in the mean: the number of samples, if batches
                differ in size.

        Returns:
            What became of the gradients.

        Raises:
            ConfigError: If the loss is no number, or the weight not positive and finite.
            LayoutError: If the module's parameters are no longer those that have joined.
            MmrpcError: If the trainer or the server was closed, or another took its place.
            NoSpaceError: If the server could not publish the step that it made.
            RpcTimeoutError: If the step was not made in time.
            PeerLostError: If the server died.
        """
        if loss is not None:
            loss = arguments.number("loss", loss)
        weight = arguments.positive("weight", weight)
        outbox = self._open_outbox()
        outbox.check_module()
        push = self._unanswered
        if push is not None and outbox.is_touched:  # given up: other gradients have come since
            self._sequence += 1
            push = None
        if push is None:
            push = self._push(outbox.complete(self._sequence), loss, weight)
        self._unanswered = push
        # Until there is an answer the server may read the slot: backward must write elsewhere.
        outbox.detach()
        answer: Pushed = self._call("push", push)
        self._unanswered = None
        self._take(answer.parameters)
        self._begin()
        return answer

    def pull(self) -> int:
        """Takes the newest parameters without giving gradients; gives their version.

        Raises:
            MmrpcError: As for `step`.
        """
        self._open_outbox()
        self._take(self._call("pull", self._worker, self._incarnation))
        return self.version

    def zero_grad(self) -> None:
        """Forgets the gradients since the last step.

        Raises:
            MmrpcError: If the trainer was closed.
        """
        self._unanswered = None
        self._begin()

    def push_nbytes(self) -> int:
        """Bytes that a push of the present gradients would put into its message.

        Raises:
            MmrpcError: If the trainer was closed.
        """
        push = self._push(self._open_outbox().contents(), None, 1.0)
        return rpc.message_nbytes(registry.call, (self._name, "push", (push,)))

    def close(self) -> None:
        """Leaves; the others do not wait for this trainer any more. The module keeps its values."""
        if self._is_closed:
            return
        self._let_go()
        tensors = attach.tensors_of(self.module)
        attach.point(self.module, {name: t.detach().clone() for name, t in tensors.items()})
        try:
            self._call("leave", self._worker, self._incarnation)
        except MmrpcError as error:  # there is nobody left to leave
            _log.warning("could not leave %s: %s", self._server, error)

    def _let_go(self) -> None:
        self._is_closed = True
        _trainers.discard(self)
        if self._outbox is not None:
            self._outbox.stop()

    def _open_outbox(self) -> Outbox:
        if self._outbox is None or self._is_closed:
            is_forked = self._pid != os.getpid()
            raise MmrpcError(
                "the trainer " + ("is of the parent process" if is_forked else "was closed"),
                hint="Make a new Trainer, which joins again.",
            )
        return self._outbox

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        self._sequence += 1
        self._open_outbox().begin(self._sequence)

    def _push(self, contents: Contents, loss: float | None, weight: float) -> Push:
        return Push(
            self._worker,
            self._incarnation,
            self._sequence,
            self.version,
            weight,
            loss,
            contents.untouched,
            contents.rows,
            contents.dense,
            contents.buffers,
        )

    def _take(self, parameters: Parameters) -> None:
        """Makes the module's parameters those, and its buffers too the first time."""
        tensors: Mapping[str, torch.Tensor] | None = parameters.values
        if parameters.live is not None:
            tensors = parameters.live.tensors
        elif parameters.published is not None:
            tensors = parameters.published.tensors
        self._version = parameters.version
        if tensors is None:
            return
        if self._outbox is None:
            attach.point(self.module, tensors)
            return
        own = self._outbox.buffers()
        attach.point(self.module, {n: t for n, t in tensors.items() if n not in own})
        self._outbox.remember_places()

    def _call(
        self, method: str, *args: Any, wait_s: float = 0.0, timeout_s: float | None = None
    ) -> Any:
        return rpc.rpc_sync(
            self._server,
            registry.call,
            (self._name, method, args, wait_s),
            timeout=self._timeout_s if timeout_s is None else timeout_s,
        )


_trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()


def _in_child() -> None:
    # Its backward would write into the gradients of the process that forked it. No torch function
    # may run here: the threads that it would wait for are not there.
    for trainer in list(_trainers):
        trainer._let_go()


os.register_at_fork(after_in_child=_in_child)
