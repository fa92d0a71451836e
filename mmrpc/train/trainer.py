"""`Trainer`: a module whose parameters are a server's, and whose backward writes where it reads."""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from mmrpc import rpc
from mmrpc.core.system import host
from mmrpc.errors import LayoutError, MmrpcError, PathError
from mmrpc.train import arguments, attach, registry
from mmrpc.train.arena import Arena
from mmrpc.train.messages import Join, Joined, Link, Parameters, Push, Pushed
from mmrpc.train.rows import RowMemory
from mmrpc.train.slot import Slot

if TYPE_CHECKING:
    from torch import nn

    from mmrpc.train.messages import Rows

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
        join_timeout_s: Seconds to wait for the server to be made.

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
        if timeout_s is not None:
            timeout_s = _call_timeout("timeout_s", timeout_s)
        join_timeout_s = _call_timeout("join_timeout_s", join_timeout_s)
        self.module = module
        self._server, self._name = server, name
        self._timeout_s = _UNSET if timeout_s is None else timeout_s
        self._worker: str = rpc.get_worker_info().name
        self._pid = os.getpid()
        self._parameters = attach.trained(module)
        self._has_buffers = bool(attach.buffers_of(module))
        self._is_closed = False
        self._version: int | None = None
        self._sequence = 0
        self._unanswered: Push | None = None
        self._touched: set[str] = set()
        self._rows: dict[str, RowMemory] = {}
        joined = self._join(specs, by_value, join_timeout_s)
        self._incarnation = joined.incarnation
        self.link: Link = joined.link
        self._sparse = joined.sparse
        self._slot = None if joined.slot is None else Slot(Arena(joined.slot))
        _log.info("joined %s: %s", server, self.link)
        self._take(joined.parameters)
        self._own_buffers()
        self._hooks = [self._watch(name, p) for name, p in self._parameters.items()]
        self._begin()
        _trainers.add(self)

    def _join(self, specs: dict[str, Any], by_value: bool, timeout_s: float) -> Joined:
        join = Join(self._worker, host.host_id(), host.memory_host_id(), specs, by_value)
        try:
            return self._call("join", join, wait_s=timeout_s * _PATIENCE, timeout_s=timeout_s)  # type: ignore[no-any-return]
        except PathError as error:
            if by_value:
                raise
            # The server's files or memory are not reachable from here after all.
            _log.warning("parameters and gradients will be sent, not mapped: %s", error)
            return self._join(specs, True, timeout_s)

    @property
    def version(self) -> int:
        """How many steps were made when the parameters were taken."""
        return self._version or 0

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
        self._check_open()
        self._check_module()
        push = self._unanswered
        if push is None or self._touched:
            push = self._complete(loss, weight)
        self._unanswered = push
        # Until there is an answer the server may read the slot: backward must write elsewhere.
        self._detach_gradients()
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
        self._check_open()
        self._take(self._call("pull", self._worker, self._incarnation))
        return self.version

    def zero_grad(self) -> None:
        """Forgets the gradients since the last step.

        Raises:
            MmrpcError: If the trainer was closed.
        """
        self._check_open()
        self._unanswered = None
        self._begin()

    def push_nbytes(self) -> int:
        """Bytes that a push of the present gradients would put into its message."""
        push = self._message(None, 1.0)
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
        for hook in self._hooks:
            hook.remove()
        self._detach_gradients()

    def _check_open(self) -> None:
        if self._is_closed:
            forked = self._pid != os.getpid()
            raise MmrpcError(
                "the trainer is of the process that forked this one"
                if forked
                else "the trainer was closed",
                hint="Make a new Trainer, which joins again.",
            )

    def _check_module(self) -> None:
        """Refuses a module whose parameters are others now: they would not be trained."""
        now = attach.trained(self.module)
        for name, p in self._parameters.items():
            if now.get(name) is not p or p.data_ptr() != self._addresses[name]:
                what = "is no longer the parameter, or not where it was"
                break
        else:
            name = next(iter(now.keys() - self._parameters.keys()), "")
            what = "has come, or requires gradients now"
        if name:
            raise LayoutError(
                f"{name!r} {what}, since the module has joined",
                hint="Change the module before, or close this trainer and make a new one.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Gradients.

    def _begin(self) -> None:
        """Points the gradients to the slot, cleared, for the next push."""
        self._sequence += 1
        self._touched.clear()
        slot = self._slot
        if slot is None:
            self._detach_gradients()
            return
        slot.begin(self._sequence)
        if slot.gradients:
            torch._foreach_zero_(list(slot.gradients.values()))
        for name, p in self._parameters.items():
            p.grad = slot.gradients.get(name)

    def _watch(self, name: str, parameter: Any) -> Any:
        """Notes that backward gave a parameter a gradient: the slot cannot tell from zeros."""
        return parameter.register_post_accumulate_grad_hook(lambda _: self._touched.add(name))

    def _detach_gradients(self) -> None:
        for p in self._parameters.values():
            p.grad = None

    def _complete(self, loss: float | None, weight: float) -> Push:
        if self._unanswered is not None:  # given up: other gradients have come since
            self._sequence += 1
            self._unanswered = None
            if self._slot is not None:
                self._slot.begin(self._sequence)
        if self._slot is not None:
            self._gather_in(self._slot)
        push = self._message(loss, weight)
        self._touched.clear()
        if self._slot is not None:
            self._slot.complete(self._sequence)
        return push

    def _gather_in(self, slot: Slot) -> None:
        """Copies what is not in the slot already: where gradients were set to None, or replaced."""
        for name, place in slot.gradients.items():
            gradient = self._parameters[name].grad
            if gradient is not None and gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                self._touched.add(name)
        buffers = self._buffers_now()
        for name, place in slot.buffers.items():
            if buffers[name].data_ptr() != place.data_ptr():
                place.copy_(buffers[name])

    def _message(self, loss: float | None, weight: float) -> Push:
        rows: dict[str, Rows] = {}
        dense: dict[str, torch.Tensor] = {}
        for name, p in self._parameters.items():
            if p.grad is None:
                continue
            if name in self._sparse:
                rows[name] = self._rows_of(name, p.grad)
            elif self._slot is None:
                dense[name] = p.grad.to_dense() if p.grad.is_sparse else p.grad
        untouched = self._parameters.keys() - self._touched - rows.keys()
        return Push(
            self._worker,
            self._incarnation,
            self._sequence,
            self.version,
            weight,
            loss,
            frozenset(untouched),
            rows,
            dense if self._slot is None else None,
            dict(self._buffers_now()) if self._slot is None else None,
        )

    def _rows_of(self, name: str, gradient: torch.Tensor) -> Rows:
        if not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        gradient = gradient.coalesce()
        numbers, values = gradient.indices()[0], gradient.values()
        if self._slot is None:
            return numbers, values
        memory = self._rows.setdefault(name, RowMemory(values.dtype, values.shape[1:]))
        return memory.write(numbers, values)

    # Parameters.

    def _take(self, parameters: Parameters) -> None:
        tensors: dict[str, torch.Tensor] | None = parameters.values
        if parameters.live is not None:
            tensors = parameters.live.tensors
        elif parameters.published is not None:
            tensors = parameters.published.tensors
        if tensors is not None:
            buffers = self._buffers_now() if self._version is not None else {}
            attach.point(self.module, {n: t for n, t in tensors.items() if n not in buffers})
            self._addresses = {name: p.data_ptr() for name, p in self._parameters.items()}
        self._version = parameters.version

    def _buffers_now(self) -> dict[str, torch.Tensor]:
        return attach.buffers_of(self.module) if self._has_buffers else {}

    def _own_buffers(self) -> None:
        """Moves the buffers, which start with the server's values, to memory of this trainer."""
        for name, buffer in self._buffers_now().items():
            if self._slot is None:
                buffer.data = buffer.detach().clone()
            else:
                self._slot.buffers[name].copy_(buffer)
                buffer.data = self._slot.buffers[name]

    def _call(
        self, method: str, *arguments: Any, wait_s: float = 0.0, timeout_s: float | None = None
    ) -> Any:
        return rpc.rpc_sync(
            self._server,
            registry.call,
            (self._name, method, arguments, wait_s),
            timeout=self._timeout_s if timeout_s is None else timeout_s,
        )


def _call_timeout(name: str, value: float) -> float:
    """What `rpc_sync` takes: 0 for no limit."""
    found = arguments.seconds(name, value)
    return found if found < _LONGEST_S else 0.0


_trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()


def _in_child() -> None:
    # Its backward would write into the gradients of the process that forked it. No torch function
    # may run here: the threads that it would wait for are not there.
    for trainer in list(_trainers):
        trainer._let_go()


os.register_at_fork(after_in_child=_in_child)
