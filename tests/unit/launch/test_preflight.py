"""What an agent finds wrong before any worker starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from mmrpc.config import parse_config
from mmrpc.launch import preflight
from mmrpc.launch.plan import Run, plan_node


def _problems(directory: Path, node: str = "a", **more: Any) -> list[preflight.Problem]:
    config: dict[str, Any] = {
        "nodes": {"a": {}, "b": {}},
        "roles": {"w": {"target": "json:dumps", "workers": {"a": 2, "b": 1}}},
        "master": {"node": "a"},
        **more,
    }
    run = Run(parse_config(config), "id", "demo-1", (), str(directory))
    return preflight.find_problems(run, node, plan_node(run, node, "python"))


def _role(target: str, **more: Any) -> dict[str, Any]:
    return {"w": {"target": target, "workers": {"a": 2, "b": 1}, **more}}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_is_well(tmp_path: Path) -> None:
    """A module of the library, a port of the system's choice, a directory of ours."""
    assert _problems(tmp_path) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nope.sub:main", "there is no module 'nope'"),
        ("nope.py", "there is no script 'nope.py'"),
        ("nope --now", "there is no program 'nope'"),
    ],
)
def test_a_missing_target_is_told_once(tmp_path: Path, target: str, reason: str) -> None:
    """Two workers of one role share one problem, which names the key."""
    (problem,) = _problems(tmp_path, roles=_role(target))
    assert problem.reason.startswith(reason)
    assert "roles.w.target" in problem.hint


def test_a_target_is_looked_for_where_the_worker_will(tmp_path: Path) -> None:
    """In the working directory, on the role's PYTHONPATH and on its PATH."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "here.py").write_text("raise SystemExit('imported')")
    (elsewhere / "there.py").write_text("")
    (elsewhere / "tool").write_text("#!/bin/sh\n")
    (elsewhere / "tool").chmod(0o755)
    assert _problems(tmp_path, roles=_role("here:main")) == []
    for target, variable in (("there:main", "PYTHONPATH"), ("tool", "PATH")):
        assert _problems(tmp_path, roles=_role(target)) != []
        role = _role(target, env={variable: str(elsewhere)})
        assert _problems(tmp_path, roles=role) == []


def test_a_port_in_use_is_told_on_the_masters_node_only(tmp_path: Path) -> None:
    """The others do not listen."""
    with socket.create_server(("", 0)) as other:
        master = {"node": "a", "port": other.getsockname()[1]}
        (problem,) = _problems(tmp_path, master=master)
        assert problem.reason.endswith("it is in use")
        assert _problems(tmp_path, "b", master=master) == []


def test_a_master_that_everyone_takes_for_himself(tmp_path: Path) -> None:
    """A loopback address is one only as long as all nodes are on this machine."""
    remote = {"a": {"host": "localhost"}, "b": {"host": "192.0.2.1"}}
    (problem,) = _problems(tmp_path, nodes=remote)
    assert "resolves to" in problem.reason
    assert "nodes.a.host" in problem.hint
    assert _problems(tmp_path, nodes={"a": {"host": "localhost"}, "b": {"host": "127.0.0.2"}}) == []


def test_a_master_without_an_address(tmp_path: Path) -> None:
    """A name that this node cannot resolve."""
    nodes = {"a": {"host": "nope.invalid"}, "b": {}}
    (problem,) = _problems(tmp_path, "b", nodes=nodes)
    assert problem.reason.startswith("cannot resolve the master's host 'nope.invalid'")


def test_an_interface_that_is_not_there(tmp_path: Path) -> None:
    """It tells which ones are."""
    (problem,) = _problems(tmp_path, nodes={"a": {"interface": "nope0"}, "b": {}})
    assert "(there are lo" in problem.reason or ", lo" in problem.reason


def test_directories_that_cannot_be_made(tmp_path: Path) -> None:
    """A file is in the way of the logs and of the cache."""
    (tmp_path / "file").write_text("")
    nodes = {"a": {"log_dir": f"{tmp_path}/file/logs", "cache_dir": f"{tmp_path}/file"}, "b": {}}
    logs, cache = _problems(tmp_path, nodes=nodes)
    assert (logs.hint, cache.hint) == ("Set nodes.a.log_dir.", "Set nodes.a.cache_dir.")


def test_a_working_directory_that_is_not_there(tmp_path: Path) -> None:
    """The node's key is to be set; one that is there is entered."""
    (problem,) = preflight.enter(str(tmp_path / "nope"), "b")
    assert problem.hint == "Set nodes.b.cwd."
    (tmp_path / "job").mkdir()
    assert preflight.enter(str(tmp_path / "job"), "b") == []
    assert os.getcwd() == str(tmp_path / "job")


def test_mounts_are_looked_at(tmp_path: Path) -> None:
    """As the handshake will, but on this node alone."""
    config = {
        "mounts": {"data": {"access": "read"}, "params": {"access": "write"}},
        "nodes": {"a": {"mounts": {"data": f"{tmp_path}/nope", "params": str(tmp_path)}}},
        "roles": {"w": {"target": "json:dumps", "workers": {"a": 1}}},
    }
    run = Run(parse_config(config), "id", "demo-1", (), str(tmp_path))
    (problem,) = preflight.find_mount_problems(run, "a")
    assert "(mount 'data')" in problem.reason
    assert "nodes.a.mounts.data" in problem.hint
