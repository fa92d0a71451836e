"""What each node runs for ``mmrpc check``: the handshake alone, told by rank 0 as one line.

`everywhere` starts it through the launcher on all nodes; `main` is what each of them runs.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from mmrpc.config import ClusterConfig

_MARK = "mmrpc-check: "


def main() -> None:
    """Takes part in the handshake as the environment says; rank 0 prints what was found."""
    from mmrpc.errors import HandshakeError
    from mmrpc.rpc.handshake import survey

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path, worker = os.environ["MMRPC_CLUSTER"], os.environ["MMRPC_WORKER"]
    try:
        joined = survey(path, None, worker, rank, world_size)
    except HandshakeError as error:
        if rank != 0:
            return  # rank 0 tells
        found: dict[str, Any] = {"problems": list(error.problems), "nodes": [], "mounts": []}
    else:
        if joined.report is None:
            return
        found = {
            "problems": [problem.sentence() for problem in joined.verdict.problems],
            **joined.report.model_dump(mode="json"),
        }
    typer.echo(_MARK + json.dumps(found))


def everywhere(cluster: ClusterConfig) -> dict[str, Any]:
    """Runs the handshake with one process on every node of the cluster.

    Nothing is left of it; if it fails, its logs are.

    Raises:
        LaunchError: If the processes could not be started or failed.
    """
    from mmrpc.config import LogsConfig, RoleConfig
    from mmrpc.errors import LaunchError
    from mmrpc.launch.launcher import Launcher

    role = RoleConfig(target=f"{__name__}:main", workers=dict.fromkeys(cluster.nodes, 1))
    probing = cluster.model_copy(
        update={
            "name": f"{cluster.name[:58]}-check",
            "roles": {"check": role},
            "logs": LogsConfig(dir=cluster.logs.dir),
            "launch": cluster.launch.model_copy(update={"max_restarts": 0}),
        }
    )
    heard = _listener()
    Launcher(probing, is_transient=True, console=heard).launch()
    found: dict[str, Any] | None = heard.found
    if found is None:
        raise LaunchError("rank 0 ended without a report", hint="Look at its log.")
    return found


def _listener() -> Any:
    from mmrpc.launch.console import Console

    class Listener(Console):
        """Takes the report out of what the workers say, and leaves the rest to stderr."""

        def __init__(self) -> None:
            super().__init__([])
            self.found: dict[str, Any] | None = None

        def line(self, name: str, text: str, stream: str = "stdout") -> None:
            if text.startswith(_MARK):
                self.found = json.loads(text.removeprefix(_MARK))
            else:
                super().line(name, text, "stderr")

        def say(self, text: str) -> None:
            """Says nothing: the table will."""

    return Listener()
