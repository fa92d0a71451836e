"""What ``mmrpc status`` shows: documents that agents and launcher write, each by rename."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from typing import Any

from mmrpc.core.system.host import host_id, is_alive, own_start_time
from mmrpc.errors import LaunchError

STATUS_FILE = "status.json"


def write_atomically(path: str, document: Any) -> None:
    """Writes JSON so that a reader sees the old document or the new one, never a part.

    Only the user may read it: an environment can hold secrets.
    """
    directory = os.path.dirname(path)
    fd, temporary = tempfile.mkstemp(prefix=".", dir=directory)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def author() -> dict[str, Any]:
    """Who writes a document, so that a reader can tell whether it still lives."""
    return {"host": host_id(), "pid": os.getpid(), "started_ticks": own_start_time()}


def read(run_dir: str) -> dict[str, Any]:
    """Gives the state of a run as far as this host can see it.

    Args:
        run_dir: Directory of the run, on the launcher's host or on a node.

    Returns:
        A document with ``state``, ``exit_code``, ``cause`` and ``nodes``: for each node its
        ``state`` and its ``workers``. A state is ``lost`` if its author died without a word.

    Raises:
        LaunchError: If there is no run in that directory.
    """
    launcher = _load(os.path.join(run_dir, STATUS_FILE))
    nodes: dict[str, dict[str, Any]] = dict(launcher.get("nodes", {})) if launcher else {}
    runs: list[str] = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(run_dir)):
            own = _load(os.path.join(run_dir, name, STATUS_FILE))
            if own and "nodes" in own:  # a launcher's, so that this is a directory of runs
                runs.append(os.path.join(run_dir, name))
                continue
            # The launcher may have died first, or have seen the agent's end.
            if own and own["updated_s"] > nodes.get(name, {}).get("updated_s", 0):
                nodes[name] = own
    if launcher is None and not nodes:
        newest = max(runs, key=os.path.getmtime, default=None)
        if newest is not None:
            raise LaunchError(f"{run_dir!r} is no run, but holds some", hint=f"See {newest!r}.")
        raise LaunchError(
            f"there is no run in {run_dir!r}", hint="Give the directory that holds status.json."
        )
    document = launcher or {"state": "unknown", "exit_code": None, "cause": None}
    return {**_checked(document), "nodes": {name: _checked(node) for name, node in nodes.items()}}


def _load(path: str) -> dict[str, Any] | None:
    try:
        with open(path) as file:
            document: dict[str, Any] = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise LaunchError(f"cannot read {path!r}: {(error.strerror or '').lower()}") from None
    except (ValueError, RecursionError):
        document = {}
    if not isinstance(document, dict) or not {"state", "updated_s"} <= document.keys():
        raise LaunchError(f"{path!r} is not the status of a run")
    return document


def _checked(document: dict[str, Any]) -> dict[str, Any]:
    by = document.get("by")
    ended = document["state"] in ("done", "failed", "lost", "unknown")
    if ended or not by or by["host"] != host_id() or is_alive(by["pid"], by["started_ticks"]):
        return document
    workers = {
        name: {**worker, "state": "lost"} if worker["state"] == "running" else worker
        for name, worker in document.get("workers", {}).items()
    }
    return {**document, "state": "lost", **({"workers": workers} if workers else {})}


def uptime_s(worker: dict[str, Any]) -> float | None:
    """Seconds that a worker has run, or ran."""
    if worker.get("started_s") is None:
        return None
    end: float = time.time() if worker["ended_s"] is None else worker["ended_s"]
    return max(0.0, end - float(worker["started_s"]))
