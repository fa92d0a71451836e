"""A small process beside each agent that outlives it: ``python -m mmrpc.launch.guard RUN NODE``.

It waits for the end of its standard input, which the agent holds open, and then kills what is
left of the run on the node. A worker's own death signal does not reach its children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from mmrpc.launch import sweep


class Guard:
    """The agent's handle on its guard; to be closed when no worker is left to look after."""

    def __init__(self, run_id: str, node: str) -> None:
        # A session of its own: what is sent to the agent's group is not meant for it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mmrpc.launch.guard", run_id, node],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        """Lets the guard do its work and waits for it."""
        self._process.communicate()


def main() -> None:
    """Waits for the agent's end, then kills what it left."""
    _, run_id, node = sys.argv
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    sweep.kill(run_id, node)


if __name__ == "__main__":
    main()
