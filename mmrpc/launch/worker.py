"""The first thing that runs in each worker: ``python -m mmrpc.launch.worker``.

With ``--exec PARENT COMMAND...`` it ties its life to the agent and becomes the command; with
``module:function ARGS...`` it calls the function. It imports nothing that the job did not ask
for.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import types
from typing import Any

_PR_SET_PDEATHSIG = 1
_NO_NEWS = "ignore:You are using a Backend:UserWarning"


def main() -> None:
    """Runs what the arguments say; the exit code is the target's."""
    if sys.argv[1] == "--exec":
        _become(int(sys.argv[2]), sys.argv[3:])
    call(sys.argv[1], sys.argv[2:])


def _become(parent: int, command: list[str]) -> None:
    # Kept over exec. It is sent when the *thread* that forked us ends: the agent starts workers
    # from its main thread, which ends last.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the signal was set
        os.kill(os.getpid(), signal.SIGKILL)
    # torch's own, at each of its init_rpc calls, and nothing that a job could change. What the
    # user has set comes after it, and so wins.
    user = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join([_NO_NEWS, *([user] if user else [])])
    # The agent's channel is not ours to read.
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    try:
        os.execvp(command[0], command)  # noqa: S606 - a shell would be one more to end
    except OSError as error:
        print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)  # noqa: T201
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def call(target: str, arguments: list[str]) -> None:
    """Imports ``module:function`` and calls it without arguments; `sys.argv` has the rest."""
    module_name, _, name = target.partition(":")
    sys.argv = [target, *arguments]
    function: Any = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(function, part):
            sys.exit(f"mmrpc: no target {target!r}: {_missing(part, function)}")
        function = getattr(function, part)
    try:
        function()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if not _is_verdict(error):
            begin = error.__traceback__ and error.__traceback__.tb_next  # where the job's part does
            sys.excepthook(type(error), error.with_traceback(begin), begin)
            sys.exit(1)
        # It is about the cluster: where in the code it was raised would only hide it.
        print("\n".join([f"mmrpc: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _missing(name: str, owner: Any) -> str:
    from mmrpc.config.wording import unknown

    is_module = isinstance(owner, types.ModuleType)
    module = owner.__name__ if is_module else getattr(owner, "__module__", None)
    own = [
        key
        for key, value in getattr(owner, "__dict__", {}).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module
    ]
    where = getattr(owner, "__file__", None) if is_module else None
    return f"in {where or owner!r}, {unknown('function', name, own)}"


def _is_verdict(error: Exception) -> bool:
    from mmrpc.errors import ConfigError, HandshakeError

    return isinstance(error, ConfigError | HandshakeError)


if __name__ == "__main__":
    main()
