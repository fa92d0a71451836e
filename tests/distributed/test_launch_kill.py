"""SIGKILL of each member of a launch: whatever dies, no worker is left on any node."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.distributed.launching import (
    agents,
    assert_nobody_left,
    launching,
    members,
    one_role,
    wait_until,
)

TWO_NODES = {"a": 1, "b": 2}


def test_a_killed_worker_ends_the_gang_and_gives_its_code(tmp_path: Path) -> None:
    """The launcher exits with 137 and names the worker; the others are gone."""
    with launching(tmp_path, one_role("job:hold", TWO_NODES)) as launch:
        launch.until("up w0", "up w1", "up w2")
        os.kill(launch.pid_of("w1"), signal.SIGKILL)
        assert launch.code() == 128 + signal.SIGKILL
        assert "on b: worker w1 failed: killed by SIGKILL" in launch.text
        assert_nobody_left(tmp_path)


def test_a_killed_agent_takes_its_workers_along_and_ends_the_gang(tmp_path: Path) -> None:
    """Workers on the agent's node die with it, those on the other node in order."""
    config = one_role("job:stubborn", TWO_NODES, launch={"grace_s": 0.5})
    with launching(tmp_path, config) as launch:
        launch.until("up w0", "up w1", "up w2")
        os.kill(agents(tmp_path)[0], signal.SIGKILL)
        assert_nobody_left(tmp_path)
        assert launch.code() == 128 + signal.SIGKILL
        assert "the agent ended: killed by SIGKILL" in launch.text


def test_a_killed_launcher_takes_everything_along(tmp_path: Path) -> None:
    """Agents see the end of their input, and a grace without end does not save the stubborn."""
    config = one_role("job:stubborn", TWO_NODES, launch={"grace_s": 600})
    with launching(tmp_path, config) as launch:
        launch.until("up w0", "up w1", "up w2")
        launch.process.kill()
        assert_nobody_left(tmp_path)


def test_a_killed_launcher_and_agent_leave_no_child_of_a_worker(tmp_path: Path) -> None:
    """What a worker started in a session of its own ends too, although all above it are dead."""
    with launching(tmp_path, one_role("job:family", 1)) as launch:
        launch.until("up w0", "child")
        (agent,) = agents(tmp_path)
        launch.process.kill()
        os.kill(agent, signal.SIGKILL)
        assert_nobody_left(tmp_path)


def test_a_killed_guard_is_not_needed_for_the_workers_themselves(tmp_path: Path) -> None:
    """The kernel ends workers with the agent, without help."""
    with launching(tmp_path, one_role("job:hold", 2)) as launch:
        launch.until("up w0", "up w1")
        (guard,) = (pid for pid, text in members(tmp_path).items() if "launch.guard" in text)
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: guard not in members(tmp_path))
        os.kill(agents(tmp_path)[0], signal.SIGKILL)
        assert_nobody_left(tmp_path)
