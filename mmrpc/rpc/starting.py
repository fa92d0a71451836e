"""Starting torch's part of a group, at a store where all ranks have already met.

torch would open a store of its own and wait there for half an hour. It takes a store from a
rendezvous handler as well; and what it does then has a deadline here, since a worker can still
be lost before the group exists.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch.distributed
from torch.distributed import DistError

from mmrpc.errors import HandshakeError
from mmrpc.paths.deadline import Deadline
from mmrpc.rpc import faults, rendezvous, torchrpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

_SCHEME: Final = "mmrpc-met"

T = TypeVar("T")

_MARGIN_S: Final = 30.0
"""How much longer than its own deadline a meeting may take before it counts as hung."""

_store: Store | None = None


def meet(meeting: Callable[[], T], timeout_s: float, rank: int) -> T:
    """Lets this rank meet the others, and ends at once if a signal wants it to.

    Args:
        meeting: Has deadlines of its own, but for a peer that is stopped.
        timeout_s: The longest of those, in seconds.
        rank: Number of this process.

    Raises:
        HandshakeError: If nothing answers any more.
    """
    try:
        return Deadline(timeout_s + _MARGIN_S).call(meeting)
    except TimeoutError as error:
        raise HandshakeError(
            f"rank {rank} met nobody within {timeout_s + _MARGIN_S:g} s, and rank 0 has not said"
            " why",
            rank=0,
            hint="Look at its log.",
        ) from error


def start(
    name: str,
    backend: Any,
    rank: int,
    world_size: int | None,
    options: torchrpc.RpcBackendOptions | None,
) -> None:
    """Starts torch's RPC in its own way."""
    with warnings.catch_warnings():
        # torch's own, about its own use of a process group: nobody here can change it.
        warnings.filterwarnings("ignore", ".*using a Backend .* as a ProcessGroup")
        torchrpc.rpc.init_rpc(name, backend, rank, world_size, options)


def start_at(
    store: Store,
    timeout_s: float,
    name: str,
    backend: Any,
    rank: int,
    world_size: int,
    options: torchrpc.RpcBackendOptions,
) -> None:
    """Starts torch's RPC between ranks that have met.

    Args:
        store: Where they met.
        timeout_s: How long it may take.
        name: As for `init_rpc`, like the others.
        backend: One of `BackendType`, or None.
        rank: Number of this worker.
        world_size: How many there are.
        options: Those of this worker; they are as before when this returns.

    Raises:
        HandshakeError: If a worker was lost meanwhile.
    """
    global _store
    _store, init_method = store, options.init_method
    options.init_method = f"{_SCHEME}://"
    try:
        # On a thread: torch does not return for a signal, and not always at its own deadline.
        Deadline(timeout_s).call(
            lambda: start(name, backend, rank, world_size, options), undo=lambda _: stop()
        )
    except TimeoutError as error:
        raise _lost(rank, f"no answer for {timeout_s:g} s") from error
    except RuntimeError as error:
        if _tells_of_a_lost_worker(error) and not rendezvous.is_out_of_descriptors(error):
            raise _lost(rank, str(error).partition("\n")[0].rstrip(".")) from error
        raise
    finally:
        options.init_method = init_method


def _in_child() -> None:
    """A child is in no group: what it has of its parent's lacks the threads that serve it.

    It is left as it is, since its end would wait for those threads.
    """
    if _store is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_store))
    torchrpc.abandon_agent()


os.register_at_fork(after_in_child=_in_child)


def stop() -> None:
    """Ends what torch leaves behind when the first round of calls fails."""
    if torchrpc.is_initialized():
        torchrpc.rpc.shutdown(graceful=False)


def _tells_of_a_lost_worker(error: RuntimeError) -> bool:
    return (
        isinstance(error, DistError)
        or "gloo/" in str(error)
        or faults.typed(error, faults.Call("", "init_rpc")) is not None
    )


def _lost(rank: int, why: str) -> HandshakeError:
    return HandshakeError(
        f"rank {rank} lost another worker while RPC began ({why})",
        hint="Look at the logs and the exit codes of the others.",
    )


def _hand_over(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    query = dict(pair.split("=") for pair in url.partition("?")[2].split("&"))
    if _store is None:
        raise RuntimeError("no store was met at")
    yield _store, int(query["rank"]), int(query["world_size"])


_torch_distributed: Any = torch.distributed
_torch_distributed.register_rendezvous_handler(_SCHEME, _hand_over)
