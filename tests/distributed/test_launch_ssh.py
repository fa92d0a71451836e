"""Launches by a real ssh through real servers on loopback ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import (
    PYTHON,
    agents,
    assert_nobody_left,
    launching,
)
from tests.distributed.sshd import Sshd, serving
from tests.needs import needs

pytestmark = needs("sshd")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sshd]]:
    """One server for each of two nodes."""
    base = tmp_path_factory.mktemp("sshd")
    with serving(base / "a") as a, serving(base / "b") as b:
        yield {"a": a, "b": b}


@pytest.fixture
def config(servers: dict[str, Sshd], tmp_path: Path) -> dict[str, Any]:
    """Two nodes that share nothing but a host: each has its own working and log directory."""
    nodes = {}
    for name, server in servers.items():
        (tmp_path / f"logs-{name}").mkdir()
        nodes[name] = server.node(
            python=PYTHON, cwd=str(tmp_path), log_dir=str(tmp_path / f"logs-{name}")
        )
    return {
        "name": "test",
        "nodes": nodes,
        "roles": {"w": {"target": "job:hold", "workers": {"a": 1, "b": 2}}},
        "launch": {"via": "ssh", "grace_s": 5},
    }


def _role(config: dict[str, Any], target: str) -> dict[str, Any]:
    return {**config, "roles": {"w": {**config["roles"]["w"], "target": target}}}


def _ssh_of(launcher: int, port: int) -> int:
    listing = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(launcher)], capture_output=True, text=True
    ).stdout
    (line,) = (line for line in listing.splitlines() if f"-p {port} " in line)
    return int(line.split()[0])


def test_workers_run_where_the_config_says(tmp_path: Path, config: dict[str, Any]) -> None:
    """Ranks and names hold over nodes, and each node keeps its logs where it was told."""
    with launching(tmp_path, _role(config, "job:hello"), "--", "--lr", "0.1") as launch:
        assert launch.code() == 0, launch.text
        for rank in range(3):
            said = f"w{rank} | hello from w{rank} rank {rank} of 3 arguments ['--lr', '0.1']"
            assert said in launch.lines
    (log,) = (tmp_path / "logs-b").glob("test-*/b/w2/stdout.log")
    assert "hello from w2" in log.read_text()
    assert_nobody_left(tmp_path)


def test_a_failure_on_another_node_is_the_launchers(tmp_path: Path, config: dict[str, Any]) -> None:
    """The exit code and the end of the log come over ssh; the first node's worker ends too."""
    with launching(tmp_path, _role(config, "job:wait_for_file")) as launch:
        launch.until("up w0", "up w1", "up w2")
        (tmp_path / "end-w2").write_text("9")
        assert launch.code() == 9
        assert "on b: worker w2 failed: exit code 9" in launch.text
        assert "| about to end" in launch.text
    assert_nobody_left(tmp_path)


@pytest.mark.parametrize("member", ["launcher", "ssh", "agent", "sshd"])
def test_whoever_is_killed_nobody_is_left(
    tmp_path: Path, config: dict[str, Any], servers: dict[str, Sshd], member: str
) -> None:
    """SIGKILL of any link between launcher and workers ends the workers on both nodes."""
    with launching(tmp_path, config) as launch:
        launch.until("up w0", "up w1", "up w2")
        ssh = _ssh_of(launch.process.pid, servers["b"].port)
        victim = {
            "launcher": launch.process.pid,
            "ssh": ssh,
            "agent": agents(tmp_path)[-1],
            "sshd": _session_of(servers["b"]),
        }[member]
        os.kill(victim, signal.SIGKILL)
        assert_nobody_left(tmp_path)
        expected = {"launcher": -9, "ssh": 128 + 9, "agent": 255, "sshd": 255}[member]
        assert launch.code() == expected, launch.text


def _session_of(server: Sshd) -> int:
    """PID of the process that serves the server's only connection."""
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(server.process.pid)], capture_output=True, text=True
    ).stdout
    (pid,) = listing.split()
    return int(pid)


def test_a_wrong_python_on_one_node_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    """The error says on which node, which path, and what to set; nothing was started."""
    config["nodes"]["b"]["python"] = "/opt/nope/bin/python"
    with launching(tmp_path, config) as launch:
        assert launch.code() == 127
        assert "on b: cannot run '/opt/nope/bin/python': there is no such program" in launch.text
        assert "Set nodes.b.python" in launch.text
        assert "up w" not in launch.text
    assert_nobody_left(tmp_path)


def test_a_python_without_mmrpc_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    """An interpreter that is there, but lacks the package, is another cause."""
    config["nodes"]["b"]["python"] = "/usr/bin/python3"
    with launching(tmp_path, config) as launch:
        assert launch.code() == 1
        assert "on b: /usr/bin/python3 cannot start the agent" in launch.text
        assert "No module named" in launch.text
    assert_nobody_left(tmp_path)


def test_a_missing_working_directory_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    """A directory that only the launcher has is a problem of the node, told before the start."""
    config["nodes"]["b"]["cwd"] = "/srv/nope"
    with launching(tmp_path, config) as launch:
        assert launch.code() == 1
        assert "on b: cannot enter the working directory '/srv/nope'" in launch.text
        assert "Set nodes.b.cwd." in launch.text
    assert_nobody_left(tmp_path)


def test_a_node_that_refuses_the_connection_is_named(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """The words of ssh itself are shown."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        config["nodes"]["b"]["ssh"]["port"] = unused.getsockname()[1]
        with launching(tmp_path, config) as launch:
            assert launch.code() == 255
            assert "on b: the ssh connection failed" in launch.text
            assert "Connection refused" in launch.text
    assert_nobody_left(tmp_path)


def test_a_node_that_never_answers_is_named_at_the_deadline(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """A server that accepts and is silent does not hold the launch for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config["nodes"]["b"]["ssh"]["port"] = silent.getsockname()[1]
        config["launch"]["start_timeout_s"] = 10
        config["launch"]["ssh_options"] = ["ConnectTimeout=60"]
        with launching(tmp_path, config) as launch:
            assert launch.code() == 1
            assert "on b: no answer within 10 s from the agent of b" in launch.text
    assert_nobody_left(tmp_path)


def test_a_chatty_login_shell_does_not_get_in_between(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """What is printed on the channel before the agent starts is shown as the node's."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\necho "Welcome to b"\nexec {PYTHON} "$@"\n')
    wrapper.chmod(0o755)
    config["nodes"]["b"]["python"] = str(wrapper)
    with launching(tmp_path, _role(config, "job:hello")) as launch:
        assert launch.code() == 0
        assert any(line.split() == ["b", "|", "Welcome", "to", "b"] for line in launch.lines)


def test_dry_run_checks_every_node_and_starts_nothing(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """It finds what is wrong on a remote node, and writes no log."""
    config["nodes"]["b"]["interface"] = "nope0"
    with launching(tmp_path, config, "--dry-run") as launch:
        assert launch.code() == 1
        assert "on b: there is no network interface 'nope0'" in launch.text
        assert "agent: ssh -T" in launch.text
    assert not list(tmp_path.glob("logs-*/*"))
    assert not (tmp_path / "runs").exists()
    assert_nobody_left(tmp_path)
