"""How workers wait for each other before a graceful shutdown, without waiting for the dead.

torch's own barrier waits for ever for a worker that died. So everyone first reports to one
worker, the leader, which asks those that are missing whether they live. Nobody leaves while a
living worker is still at work; when one is lost, all learn which.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmrpc.errors import PeerLostError, RpcError, RpcTimeoutError
from mmrpc.rpc import calls, torchrpc

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUND_S = 2.0
"""How long one report waits for the verdict, and how often missing workers are asked."""
_ANSWER_S = 30.0
"""How long a worker may be too busy to answer before that counts as no answer this round."""
_LINGER_S = 5.0
"""How long the leader stays for others to fetch a verdict that ends the group."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the leader knows.

    Attributes:
        settled: Whether waiting is over.
        missing: Workers that did not report.
        lost: Those of them that are known to be dead.
    """

    settled: bool
    missing: tuple[str, ...]
    lost: tuple[str, ...]


class _Leader:
    """The leader's list; every worker has one, and one of them is used."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.arrived: set[str] = set()
        self.told: set[str] = set()
        self.lost: set[str] = set()
        self.over = False

    def verdict(self) -> Verdict:
        return Verdict(self.over, tuple(sorted(self.missing())), tuple(sorted(self.lost)))

    def missing(self) -> set[str]:
        return _worker_names() - self.arrived - torchrpc.in_barrier()

    def arrive(self, name: str, wait_s: float) -> Verdict:
        """Notes that a worker came, and waits a while for the verdict."""
        with self.changed:
            self.arrived.add(name)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.over, wait_s)
            if torchrpc.own_name() in torchrpc.in_barrier() and not self.missing():
                self.over = True  # nobody leads here: torch's own shutdown is to have them all
            return self.verdict()

    def acknowledge(self, name: str) -> None:
        """Notes that a worker has the verdict, and so does not need this one any more."""
        with self.changed:
            self.told.add(name)
            self.changed.notify_all()

    def withdraw(self, name: str) -> None:
        """Notes that a worker that came has left alone."""
        self.conclude({name}, False)

    def wait_for_all(self, wait_s: float) -> set[str]:
        """Gives those that have not come by then."""
        with self.changed:
            self.changed.wait_for(lambda: self.over or not self.missing(), wait_s)
            return self.missing()

    def conclude(self, dead: set[str], over: bool) -> None:
        """Notes who is dead, which ends the wait, as being over does."""
        with self.changed:
            self.arrived -= dead
            self.lost |= dead
            self.over = self.over or over or bool(dead)
            self.changed.notify_all()

    def linger(self) -> None:
        """Stays a while for those that do not know the verdict yet.

        Where one was lost, also for those that are still at work: they would take the leader
        for the one that died.
        """
        with self.changed:
            whom = _worker_names() - self.lost if self.lost else self.arrived
            self.changed.wait_for(lambda: self.told >= whom, _LINGER_S)


_leader = _Leader()


def reset() -> None:
    """Forgets who reported, for the next group of this process."""
    global _leader
    _leader = _Leader()


def gather(timeout_s: float | None) -> RpcError | None:
    """Waits until every worker came here, one is lost, or the time is over.

    Args:
        timeout_s: Seconds to wait; None for as long as the others live.

    Returns:
        None if all came; else the error that names who did not.
    """
    me = torchrpc.own_name()
    leader = min(_worker_names())
    started_s = time.monotonic()
    deadline_s = None if timeout_s is None else started_s + timeout_s
    verdict = _lead(me, deadline_s) if me == leader else _follow(leader, me, deadline_s)
    error = _error_of(verdict, time.monotonic() - started_s, timeout_s)
    if error is not None and me == leader:
        _leader.acknowledge(me)
        _leader.linger()
    elif error is not None:
        _tell(leader, _heard, me)
    return error


def _lead(me: str, deadline_s: float | None) -> Verdict:
    _leader.arrive(me, 0)
    while not _leader.over:
        left_s = _left_s(deadline_s)
        missing = _leader.wait_for_all(min(_ROUND_S, left_s))
        # Those that are still at work; and before all leave, those that came.
        dead = _dead_among(missing or _worker_names() - {me})
        _leader.conclude(dead, not missing or left_s == 0)
    return _leader.arrive(me, 0)


def _follow(leader: str, me: str, deadline_s: float | None) -> Verdict:
    verdict = Verdict(False, (), ())
    while not verdict.settled:
        left_s = _left_s(deadline_s)
        if left_s == 0:
            _tell(leader, _withdraw, me)
            break
        verdict = _ask(leader, me, min(_ROUND_S, left_s), verdict)
    return verdict


def _left_s(deadline_s: float | None) -> float:
    return _ROUND_S if deadline_s is None else max(0.0, deadline_s - time.monotonic())


def _ask(leader: str, me: str, wait_s: float, before: Verdict) -> Verdict:
    try:
        verdict: Verdict = calls.rpc_sync(leader, _report, (me, wait_s), timeout=wait_s + _ANSWER_S)
    except RpcTimeoutError:
        return before
    except PeerLostError:
        return Verdict(True, (leader,), (leader,))
    return verdict


def _error_of(verdict: Verdict, elapsed_s: float, timeout_s: float | None) -> RpcError | None:
    if verdict.settled and not verdict.missing:
        return None
    if verdict.lost:
        return PeerLostError(
            f"it ended, or left on its own, or the network to it broke{_others(verdict)}",
            hint="This worker has shut down alone. Look at the log and the exit code of the"
            " lost one.",
            peer=", ".join(verdict.lost),
            function="shutdown",
            elapsed_s=elapsed_s,
        )
    return RpcTimeoutError(
        f"not called within {timeout_s:g} s" if timeout_s is not None else "not called in time",
        hint="This worker has shut down alone. Those may still be at work.",
        peer=", ".join(verdict.missing) or "others",
        function="shutdown",
        elapsed_s=elapsed_s,
        timeout_s=timeout_s,
    )


def _others(verdict: Verdict) -> str:
    others = sorted(set(verdict.missing) - set(verdict.lost))
    return f"; {', '.join(others)} had not called it either" if others else ""


def _dead_among(names: set[str]) -> set[str]:
    asked = {name: calls.rpc_async(name, _alive, timeout=_ROUND_S) for name in names}
    dead = set()
    for name, answer in asked.items():
        try:
            answer.wait()
        except PeerLostError:
            dead.add(name)
        except RpcTimeoutError:
            pass
    return dead


def _alive() -> None:
    """Answers."""


def _report(name: str, wait_s: float) -> Verdict:
    return _leader.arrive(name, wait_s)


def _tell(leader: str, what: Callable[[str], None], me: str) -> None:
    # The leader may leave as soon as it has heard, before its answer is here.
    with contextlib.suppress(RpcTimeoutError, PeerLostError):
        calls.rpc_sync(leader, what, (me,), timeout=_ROUND_S)


def _heard(name: str) -> None:
    _leader.acknowledge(name)


def _withdraw(name: str) -> None:
    _leader.withdraw(name)


def _worker_names() -> set[str]:
    return {info.name for info in torchrpc.agent().get_worker_infos()}
