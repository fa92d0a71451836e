"""Documents of a run, and what can be told from them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mmrpc.core.system.host import host_id
from mmrpc.errors import LaunchError
from mmrpc.launch import status


def _node(updated_s: float, state: str = "running", **more: Any) -> dict[str, Any]:
    return {
        "state": state,
        "attempt": 0,
        "by": status.author(),
        "updated_s": updated_s,
        "workers": {"w0": {"state": state, "exit_code": None}},
        **more,
    }


def _launcher(nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    by = status.author()
    return {
        "state": "running",
        "updated_s": 0.0,
        "exit_code": None,
        "cause": None,
        "by": by,
        "nodes": nodes,
        **more,
    }


def test_a_directory_of_runs_names_the_newest(tmp_path: Path) -> None:
    """It is told apart from a run, which has a directory for each node."""
    for name, time_s in [("a", 20), ("b", 10)]:
        (tmp_path / name).mkdir()
        status.write_atomically(str(tmp_path / name / "status.json"), _launcher({}))
        os.utime(tmp_path / name, (time_s, time_s))
    with pytest.raises(LaunchError, match="is no run, but holds some") as caught:
        status.read(str(tmp_path))
    assert caught.value.hint == f"See {str(tmp_path / 'a')!r}."


def test_a_document_is_replaced_whole_and_private(tmp_path: Path) -> None:
    """No temporary file stays, and nobody else may read what an environment may hold."""
    path = tmp_path / "status.json"
    for value in range(2):
        status.write_atomically(str(path), {"value": value})
    assert json.loads(path.read_text()) == {"value": 1}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_document_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    """Nor does it leave its beginning."""
    path = tmp_path / "status.json"
    status.write_atomically(str(path), {"value": 0})
    with pytest.raises(TypeError):
        status.write_atomically(str(path), {"value": object()})
    assert json.loads(path.read_text()) == {"value": 0}
    assert os.listdir(tmp_path) == ["status.json"]


def test_the_newer_document_of_a_node_holds(tmp_path: Path) -> None:
    """The agent's own, where the launcher died first; the launcher's, where the agent did."""
    nodes = {"a": _node(1.0), "b": _node(9.0, "failed"), "c": _node(5.0)}
    status.write_atomically(str(tmp_path / "status.json"), _launcher(nodes))
    for name, document in (("a", _node(2.0, "done")), ("b", _node(3.0))):
        (tmp_path / name).mkdir()
        status.write_atomically(str(tmp_path / name / "status.json"), document)
    found = status.read(str(tmp_path))
    assert {name: node["state"] for name, node in found["nodes"].items()} == {
        "a": "done",
        "b": "failed",
        "c": "running",
    }


def test_a_node_alone_is_a_run_of_unknown_state(tmp_path: Path) -> None:
    """On a node that shares no directory with the launcher."""
    (tmp_path / "b").mkdir()
    status.write_atomically(str(tmp_path / "b" / "status.json"), _node(1.0))
    found = status.read(str(tmp_path))
    assert found["state"] == "unknown"
    assert found["nodes"]["b"]["state"] == "running"


def test_an_author_that_died_without_a_word_is_lost(tmp_path: Path) -> None:
    """So are its workers that ran; those that had ended before keep their state."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    by = {"host": host_id(), "pid": process.pid, "started_ticks": 1}
    process.wait()
    node = _node(1.0, by=by)
    node["workers"]["w1"] = {"state": "done", "exit_code": 0}
    status.write_atomically(str(tmp_path / "status.json"), _launcher({"a": node}, by=by))
    found = status.read(str(tmp_path))
    assert found["state"] == "lost"
    workers = found["nodes"]["a"]["workers"]
    assert (workers["w0"]["state"], workers["w1"]["state"]) == ("lost", "done")


def test_an_author_on_another_host_is_believed(tmp_path: Path) -> None:
    """Its PID means nothing here."""
    by = {"host": "elsewhere", "pid": 1, "started_ticks": 1}
    status.write_atomically(str(tmp_path / "status.json"), _launcher({}, by=by))
    assert status.read(str(tmp_path))["state"] == "running"


@pytest.mark.parametrize("content", [None, "", "not json", "[]", "{}"])
def test_what_is_no_run_is_told(tmp_path: Path, content: str | None) -> None:
    """An empty directory, and a document that is none."""
    if content is not None:
        (tmp_path / "status.json").write_text(content)
    with pytest.raises(LaunchError, match=r"there is no run in|is not the status of a run"):
        status.read(str(tmp_path))


def test_uptime_ends_with_the_worker() -> None:
    """It goes on for one that runs."""
    assert status.uptime_s({"started_s": None}) is None
    assert status.uptime_s({"started_s": 1.0, "ended_s": 3.5}) == 2.5
    running = status.uptime_s({"started_s": time.time() - 100, "ended_s": None})
    assert running is not None
    assert running >= 100
