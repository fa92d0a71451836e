"""torch's error texts about a call, turned into errors with a type.

torch tells a timeout and a lost peer apart from anything else by the text of a RuntimeError
only. What matches no text here is raised as torch raised it.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmrpc.errors import PeerLostError, RpcTimeoutError
from mmrpc.rpc.torchrpc import UNSET, default_timeout_s

if TYPE_CHECKING:
    from typing import NoReturn

    from mmrpc.errors import RpcError
    from mmrpc.rpc.spool.peers import Caller


@dataclass(slots=True)
class Call:
    """What an error tells about the call that it ended.

    Attributes:
        peer: Name of the worker that was called.
        function: Qualified name of the function.
        timeout_s: Its time limit in seconds, as it was passed: below 0 for the one of
            `init_rpc`.
        told: Who this worker said that it is.
        started_s: `time.monotonic()` when the call was made.
    """

    peer: str
    function: str
    timeout_s: float = UNSET
    told: Caller = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call was made."""
        return time.monotonic() - self.started_s


_TIMEOUT = re.compile(r"RPC ran for more than set timeout \((?P<ms>\d+) ms\)|RPCErr:1:")
_LOST = re.compile(
    # What TensorPipe says for a closed pipe depends on the transport; that it is TensorPipe who
    # says it, does not.
    r"\(this error originated at tensorpipe/"
    r"|connection (?:reset|refused|aborted)|broken pipe|not connected|host is unreachable"
    r"|network is unreachable|\bE(?:CONNRESET|CONNREFUSED|PIPE|NOTCONN|HOSTUNREACH|NETUNREACH)\b"
    r"|pipe (?:closed|was closed)|connection timed out|transport retry counter exceeded",
    re.IGNORECASE,
)


def typed(error: RuntimeError, call: Call) -> RpcError | None:
    """Gives the typed error for what torch raised.

    Args:
        error: What torch raised from a call, a future or an RRef.
        call: The call that it ended.

    Returns:
        `RpcTimeoutError` or `PeerLostError`, or None if it is neither.
    """
    text = str(error)
    elapsed_s = call.elapsed_s
    if found := _TIMEOUT.search(text):
        if found["ms"]:
            timeout_s = int(found["ms"]) / 1000
        else:
            timeout_s = call.timeout_s if call.timeout_s >= 0 else default_timeout_s()
        return RpcTimeoutError(
            f"no answer within {timeout_s:g} s",
            hint="It may still be at work. Pass a longer timeout, or look at what it waits for.",
            peer=call.peer,
            function=call.function,
            elapsed_s=elapsed_s,
            timeout_s=timeout_s,
        )
    if _LOST.search(text):
        return PeerLostError(
            f"the connection broke after {elapsed_s:.3g} s ({_first_line(text)})",
            hint=f"Look at the log and the exit code of {call.peer}: a process that is killed by"
            " SIGBUS had a file truncated under its mapping.",
            peer=call.peer,
            function=call.function,
            elapsed_s=elapsed_s,
        )
    return None


def raise_typed(error: RuntimeError, call: Call) -> NoReturn:
    """Raises the typed error for what torch raised, or that as it is."""
    error_typed = typed(error, call)
    if error_typed is None:
        raise error
    raise error_typed from error


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".")
