"""Launches whose agents are started by hand: they come to the launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

from tests.distributed.launching import assert_nobody_left, launching, one_role, run_dir


def _config(target: str, **launch: Any) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = one_role(target, {"a": 1, "b": 2}, master={"node": "a", "port": port})
    config["launch"] = {"via": "manual", "grace_s": 5, **launch}
    return config


def _directories(base: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (base / name).mkdir()
    return base / "a", base / "b"


def test_an_agent_by_hand_takes_part(tmp_path: Path) -> None:
    """The launcher says what to type; the agent's workers run in the agent's own directory."""
    on_a, on_b = _directories(tmp_path)
    config = _config("job:hello")
    with launching(on_a, config) as launch:
        launch.until("on b, run: python -m mmrpc.cli agent CONFIG --node b")
        with launching(on_b, config, "--node", "b", command="agent") as agent:
            assert launch.code() == 0, launch.text
            assert agent.code() == 0, agent.text
        assert "hello from w2 rank 2 of 3" in launch.text
    assert (run_dir(on_b) / "b" / "w2" / "stdout.log").exists()
    assert_nobody_left(on_a)
    assert_nobody_left(on_b)


def test_agents_may_come_first_and_one_of_them_is_the_launcher(tmp_path: Path) -> None:
    """The same command on each node is enough; the master's agent leads."""
    on_a, on_b = _directories(tmp_path)
    config = _config("job:wait_for_file")
    with (
        launching(on_b, config, "--node", "b", command="agent") as follower,
        launching(on_a, config, "--node", "a", command="agent") as leader,
    ):
        leader.until("up w0", "up w1", "up w2")
        (on_b / "end-w2").write_text("4")
        assert leader.code() == 4
        assert "on b: worker w2 failed: exit code 4" in leader.text
        assert follower.code() == 0, follower.text
    assert_nobody_left(on_a)
    assert_nobody_left(on_b)


def test_a_killed_launcher_ends_agents_elsewhere(tmp_path: Path) -> None:
    """Their connection is their life-line; to lose it is no success."""
    on_a, on_b = _directories(tmp_path)
    config = _config("job:stubborn", grace_s=0.5)
    with (
        launching(on_a, config) as launch,
        launching(on_b, config, "--node", "b", command="agent") as agent,
    ):
        launch.until("up w0", "up w1", "up w2")
        launch.process.kill()
        assert_nobody_left(on_a)
        assert_nobody_left(on_b)
        assert agent.code() == 1
        assert "on b: the launcher is gone" in agent.text


def test_a_killed_agent_ends_the_launch(tmp_path: Path) -> None:
    """The launcher sees its connection end, and the agent's workers are gone."""
    on_a, on_b = _directories(tmp_path)
    config = _config("job:stubborn", grace_s=0.5)
    with (
        launching(on_a, config) as launch,
        launching(on_b, config, "--node", "b", command="agent") as agent,
    ):
        launch.until("up w0", "up w1", "up w2")
        agent.process.kill()
        assert_nobody_left(on_b)
        assert launch.code() == 1
        assert "on b: the connection to the agent was lost" in launch.text
    assert_nobody_left(on_a)


def test_ctrl_c_at_one_agent_ends_all(tmp_path: Path) -> None:
    """The agent gives 130, and the launch has failed."""
    on_a, on_b = _directories(tmp_path)
    config = _config("job:hold")
    with (
        launching(on_a, config) as launch,
        launching(on_b, config, "--node", "b", command="agent") as agent,
    ):
        launch.until("up w0", "up w1", "up w2")
        agent.process.send_signal(signal.SIGINT)
        assert agent.code() == 130
        assert launch.code() != 0
    assert_nobody_left(on_a)
    assert_nobody_left(on_b)


def test_a_node_that_never_comes_is_named(tmp_path: Path) -> None:
    """At the deadline, by name."""
    on_a, _ = _directories(tmp_path)
    with launching(on_a, _config("job:hold", start_timeout_s=5)) as launch:
        assert launch.code() == 1
        assert "on b: no answer within 5 s from the agent of b" in launch.text
    assert_nobody_left(on_a)


def test_an_agent_without_a_launcher_gives_up(tmp_path: Path) -> None:
    """At the deadline, with the address that it tried."""
    _, on_b = _directories(tmp_path)
    config = _config("job:hold", start_timeout_s=2)
    with launching(on_b, config, "--node", "b", command="agent") as agent:
        assert agent.code() == 1
        assert f"no launcher at 127.0.0.1:{config['master']['port']} within 2 s" in agent.text


def test_an_agent_with_another_config_is_refused(tmp_path: Path) -> None:
    """Both say so; the launch goes on waiting for the right one."""
    on_a, on_b = _directories(tmp_path)
    config = _config("job:hello")
    other = json.loads(json.dumps(config))
    other["rpc"] = {"threads": 3}
    with launching(on_a, config) as launch:
        launch.until("on b, run:")
        with launching(on_b, other, "--node", "b", command="agent") as agent:
            assert agent.code() == 1
            assert "the launcher has another config" in agent.text
        with launching(on_b, config, "--node", "b", command="agent"):
            assert launch.code() == 0, launch.text


def test_a_port_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """By the launcher and by an agent, before either waits for the other."""
    on_a, on_b = _directories(tmp_path)
    config = _config("job:hello")
    config["master"]["port"] = 0
    with (
        launching(on_a, config) as launch,
        launching(on_b, config, "--node", "b", command="agent") as agent,
    ):
        for one in (launch, agent):
            assert one.code() == 2
            assert "master.port" in one.text


def test_a_stranger_at_the_port_is_no_agent(tmp_path: Path) -> None:
    """Whoever connects and says something else is sent away."""
    on_a, on_b = _directories(tmp_path)
    config = _config("job:hello")
    with launching(on_a, config) as launch:
        launch.until("on b, run:")
        with socket.create_connection(("127.0.0.1", config["master"]["port"])) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(30)
            assert b"this is no agent" in stranger.recv(4096)
        with launching(on_b, config, "--node", "b", command="agent"):
            assert launch.code() == 0, launch.text
    assert os.listdir(on_a / "runs")
