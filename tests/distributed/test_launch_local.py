"""Launches on this machine: what runs, where its output goes, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import (
    PYTHON,
    assert_nobody_left,
    launching,
    members,
    one_role,
    run_dir,
    wait_until,
    write_job,
)


def test_sixteen_workers_get_their_names_and_ranks(tmp_path: Path) -> None:
    """Names and ranks are computed, printed, and all on the console with the worker's name."""
    with launching(tmp_path, one_role("job:hello", 16)) as launch:
        assert launch.code() == 0, launch.text
        said = [line.split(" | ")[1] for line in launch.lines if "hello from" in line]
        assert sorted(said) == sorted(
            f"hello from w{rank} rank {rank} of 16 arguments []" for rank in range(16)
        )
        assert any(line.split()[1:4] == ["15", "w15", "a"] for line in launch.lines)
    assert_nobody_left(tmp_path)


def test_the_environment_names_the_worker(tmp_path: Path) -> None:
    """All that init_rpc wants to know is there; a role's variables win over its node's."""
    config = one_role("job:environment", 1)
    config["nodes"]["a"] = {"env": {"COLOUR": "red"}, "interface": "lo"}
    config["roles"]["w"]["env"] = {"COLOUR": "blue"}
    with launching(tmp_path, config) as launch:
        assert launch.code() == 0, launch.text
        env = dict(line.split("env ")[1].split("=", 1) for line in launch.lines if "env " in line)
    directory = run_dir(tmp_path)
    expected = {
        "COLOUR": "blue",
        "MMRPC_WORKER": "w0",
        "MMRPC_ROLE": "w",
        "MMRPC_NODE": "a",
        "MMRPC_RESTARTS": "0",
        "MMRPC_RUN_DIR": str(directory),
        "MMRPC_CLUSTER": str(directory / "a" / "cluster.json"),
        "MASTER_ADDR": "127.0.0.1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "TP_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert env.items() >= expected.items()
    assert int(env["MASTER_PORT"]) > 0
    assert env["MMRPC_RUN_ID"]


@pytest.mark.parametrize(
    "target", ["job:hello", "script.py", f"{PYTHON} -c 'import job; job.hello()'", "./run.sh"]
)
def test_a_target_is_a_function_a_script_or_a_command(tmp_path: Path, target: str) -> None:
    """Each gets the role's arguments and then those of the command line."""
    (tmp_path / "script.py").write_text(
        "if __name__ == '__main__':\n    import job\n    job.hello()\n"
    )
    shell = tmp_path / "run.sh"
    shell.write_text(f'#!/bin/sh\nexec {PYTHON} script.py "$@"\n')
    shell.chmod(0o755)
    config = one_role(target, 1)
    config["roles"]["w"]["args"] = ["--size", 3]
    with launching(tmp_path, config, "--", "--fast") as launch:
        assert launch.code() == 0, launch.text
        assert "w0 | hello from w0 rank 0 of 1 arguments ['--size', '3', '--fast']" in launch.lines


def test_the_first_failure_ends_the_gang_with_its_code(tmp_path: Path) -> None:
    """Its code is the launcher's; the cause and the end of its log are on one screen."""
    with launching(tmp_path, one_role("job:wait_for_file", {"a": 2, "b": 1})) as launch:
        launch.until("up w0", "up w1", "up w2")
        (tmp_path / "end-w1").write_text("7")
        assert launch.code() == 7
        assert "on a: worker w1 failed: exit code 7 after" in launch.text
        assert f"the end of {run_dir(tmp_path)}/a/w1/stderr.log:" in launch.text
        assert launch.lines[-1] == "  | about to end"
    assert_nobody_left(tmp_path)


def test_a_worker_that_ends_well_ends_nobody_else(tmp_path: Path) -> None:
    """The launcher waits for all."""
    with launching(tmp_path, one_role("job:wait_for_file", 2)) as launch:
        launch.until("up w0", "up w1")
        (tmp_path / "end-w0").write_text("0")
        wait_until(lambda: _state(tmp_path, "w0") == "done")
        assert launch.process.poll() is None
        (tmp_path / "end-w1").write_text("0")
        assert launch.code() == 0


def test_an_exception_is_shown_with_its_traceback(tmp_path: Path) -> None:
    """The end of the log says what was raised, and all of it is on the console once."""
    for shown in ([], ["all"]):
        config = one_role("job:raises", 1, logs={"dir": str(tmp_path / "logs"), "tee": shown})
        with launching(tmp_path, config) as launch:
            assert launch.code() == 1
            assert launch.lines[-1] == "  | ValueError: the learning rate is negative"
            assert launch.text.count("Traceback (most recent call last)") == 1


def test_a_signal_is_128_and_its_number(tmp_path: Path) -> None:
    """A worker that dies of SIGBUS gives 135, and the usual reason as a hint."""
    with launching(tmp_path, one_role("job:bus", 1)) as launch:
        assert launch.code() == 128 + signal.SIGBUS
        assert "killed by SIGBUS" in launch.text
        assert "truncated" in launch.text


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    """A stubborn worker does not keep the launcher; neither does a child in another session."""
    config = one_role("job:stubborn", 1, launch={"grace_s": 0.5})
    config["roles"]["failing"] = {"target": "job:wait_for_file", "workers": {"a": 1}}
    config["roles"]["family"] = {"target": "job:family", "workers": {"a": 1}}
    with launching(tmp_path, config) as launch:
        launch.until("up w0", "up failing0", "up family0", "child")
        (tmp_path / "end-failing0").write_text("3")
        assert launch.code() == 3
        assert not members(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_to_the_launcher_ends_everything(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Ctrl-C, a scheduler's SIGTERM and a closed terminal give the shell's codes."""
    with launching(tmp_path, one_role("job:hold", {"a": 1, "b": 1})) as launch:
        launch.until("up w0", "up w1")
        launch.process.send_signal(number)
        assert launch.code() == code
        assert not members(tmp_path)
    assert json.loads((run_dir(tmp_path) / "status.json").read_text())["exit_code"] == code


def test_a_second_signal_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    """Who asks twice means it; the first one's code holds."""
    config = one_role("job:stubborn", 1, launch={"grace_s": 600})
    with launching(tmp_path, config) as launch:
        launch.until("up w0")
        launch.process.send_signal(signal.SIGINT)
        launch.until("told w0 to end")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.code() == 130
        assert not members(tmp_path)


def test_a_signal_before_the_workers_are_there_ends_the_launch(tmp_path: Path) -> None:
    """Agents that are still starting end as well."""
    with launching(tmp_path, one_role("job:hold", {"a": 1, "b": 1})) as launch:
        launch.until("logs in")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.code() == 143
        assert not members(tmp_path)


def test_a_reader_that_goes_away_ends_the_launch(tmp_path: Path) -> None:
    """``mmrpc launch | head -1`` leaves nothing behind."""
    # Only who writes can find out that nobody reads.
    write_job(tmp_path, one_role("job:talk", 2))
    done = subprocess.run(
        ["sh", "-c", f"{PYTHON} -m mmrpc.cli launch cluster.json 2>/dev/null | head -1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout.count("\n") == 1
    assert_nobody_left(tmp_path)


def test_a_failed_gang_is_started_again_with_the_count(tmp_path: Path) -> None:
    """The second attempt sees MMRPC_RESTARTS=1; the first one's logs are kept."""
    config = one_role("job:second_time_lucky", {"a": 1, "b": 1}, launch={"max_restarts": 1})
    with launching(tmp_path, config) as launch:
        assert launch.code() == 0, launch.text
        assert "restarting all workers: 1 of 1" in launch.text
    logs = run_dir(tmp_path) / "a" / "w0"
    assert (logs / "stdout.log").read_text() == "attempt 1\n"
    assert (logs / "stdout.0.log").read_text() == "attempt 0\n"


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    """After the last one the code is the worker's."""
    config = one_role("job:raises", 1, launch={"max_restarts": 2})
    with launching(tmp_path, config) as launch:
        assert launch.code() == 1
        assert "restarting all workers: 2 of 2" in launch.text
        assert "3 of 2" not in launch.text


def test_logs_and_the_resolved_config_are_beside_each_other(tmp_path: Path) -> None:
    """Streams are apart, `tee` chooses whose lines are shown, and only the user may read all."""
    config = one_role(
        "sh -c 'echo out of $MMRPC_WORKER; echo err of $MMRPC_WORKER >&2'",
        {"a": 1, "b": 1},
        logs={"dir": "runs", "tee": ["w1"]},
    )
    with launching(tmp_path, config, "--set", "logs.dir=elsewhere") as launch:
        assert launch.code() == 0, launch.text
        assert {"w1 | out of w1", "w1 | err of w1"} <= set(launch.lines)
        assert "of w0" not in launch.text
    (directory,) = (tmp_path / "elsewhere").iterdir()
    assert directory.name.startswith("test-2")
    assert (directory / "a" / "w0" / "stdout.log").read_text() == "out of w0\n"
    assert (directory / "a" / "w0" / "stderr.log").read_text() == "err of w0\n"
    for file in (directory / "cluster.json", directory / "b" / "cluster.json"):
        assert json.loads(file.read_text())["logs"]["dir"] == "elsewhere"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_status_tells_of_the_running_and_the_ended(tmp_path: Path) -> None:
    """Workers with state, uptime and exit code; also of a launcher that was killed."""
    with launching(tmp_path, one_role("job:wait_for_file", {"a": 1, "b": 1})) as launch:
        launch.until("up w0", "up w1")
        (tmp_path / "end-w0").write_text("0")
        wait_until(lambda: _state(tmp_path, "w0") == "done")
        text = _status(tmp_path)
        assert text.splitlines()[0].endswith(": running")
        rows = {line.split()[1]: line.split() for line in text.splitlines()[2:]}
        assert rows["w0"][2:4] == ["a", "done"]
        assert rows["w0"][5] == "0"
        assert rows["w1"][2:4] == ["b", "running"]
        assert rows["w1"][6] == str(launch.pid_of("w1"))
        launch.process.kill()
        assert launch.code() == -signal.SIGKILL
        assert_nobody_left(tmp_path)
        assert _status(tmp_path).splitlines()[0].endswith(": lost")


def _status(directory: Path, *words: str) -> str:
    done = subprocess.run(
        [PYTHON, "-m", "mmrpc.cli", "status", str(run_dir(directory)), *words],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _state(directory: Path, worker: str) -> str | None:
    for path in run_dir(directory).glob("*/status.json"):
        workers: dict[str, Any] = json.loads(path.read_text()).get("workers", {})
        if worker in workers:
            return str(workers[worker]["state"])
    return None


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    """Nothing is started when the master cannot listen."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        config = one_role("job:hold", 1, master={"node": "a", "port": port})
        with launching(tmp_path, config) as launch:
            assert launch.code() == 1
            assert f"on a: cannot listen on port {port}: it is in use" in launch.text
            assert "up w0" not in launch.text
    assert_nobody_left(tmp_path)


def test_a_master_that_resolves_to_loopback_is_named(tmp_path: Path) -> None:
    """A name that every node takes for itself is refused before it makes the cluster hang."""
    config = one_role("job:hold", {"a": 1, "b": 1})
    config["nodes"] = {"a": {"host": "localhost"}, "b": {"host": "192.0.2.7"}}
    with launching(tmp_path, config) as launch:
        assert launch.code() == 1
        assert "on a: the master's host 'localhost' resolves to 127.0.0.1" in launch.text
        assert "up w0" not in launch.text
    assert_nobody_left(tmp_path)


def test_a_node_without_the_target_is_named(tmp_path: Path) -> None:
    """Every missing target is told at once, with the key to mend."""
    config = one_role("nope:main", 1)
    config["roles"]["script"] = {"target": "nope.py", "workers": {"a": 1}}
    config["roles"]["command"] = {"target": "nope --now", "workers": {"a": 1}}
    with launching(tmp_path, config) as launch:
        assert launch.code() == 1
        for text in ("no module 'nope'", "no script 'nope.py'", "no program 'nope'"):
            assert text in launch.text
        assert "Mend roles.script.target." in launch.text


def test_a_wrong_python_is_named(tmp_path: Path) -> None:
    """For a node on this machine, too."""
    config = one_role("job:hold", 1)
    config["nodes"]["a"]["python"] = "/opt/nope/python"
    with launching(tmp_path, config) as launch:
        assert launch.code() == 127
        assert "on a: cannot run '/opt/nope/python': no such file or directory" in launch.text
        assert "Mend nodes.a.python." in launch.text


def test_a_master_without_workers_hosts_the_store(tmp_path: Path) -> None:
    """Rank 0 is elsewhere then, and the job runs."""
    config = one_role("job:hello", {"b": 2})
    config["nodes"]["head"] = {}
    config["master"] = {"node": "head"}
    with launching(tmp_path, config) as launch:
        assert launch.code() == 0, launch.text
        assert "hello from w1 rank 1 of 2" in launch.text


def test_dry_run_prints_what_would_run_and_starts_nothing(tmp_path: Path) -> None:
    """Command lines, environments without secrets, and paths are on standard output."""
    config = one_role("job:hold", 1)
    config["roles"]["w"]["env"] = {"API_TOKEN": "hush", "COLOUR": "blue"}
    with launching(tmp_path, config, "--dry-run", "--", "--lr", "1") as launch:
        assert launch.code() == 0, launch.text
        assert f"argv: {PYTHON} -m mmrpc.launch.worker job:hold --lr 1" in launch.text
        assert "COLOUR=blue" in launch.text
        assert "hush" not in launch.text
        assert f"cwd: {tmp_path}" in launch.text
        assert launch.lines[-2] == "checks: passed"
        assert launch.lines[-1].endswith(PYTHON)
    assert sorted(os.listdir(tmp_path)) == ["cluster.json", "job.py"]


def test_two_launches_in_one_second_keep_apart(tmp_path: Path) -> None:
    """Each has a directory of its own."""
    config = one_role("job:hello", 1)
    with launching(tmp_path, config) as one, launching(tmp_path, config) as two:
        assert (one.code(), two.code()) == (0, 0)
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_ctrl_c_while_a_failed_gang_is_stopped_is_no_restart(tmp_path: Path) -> None:
    """The signal wins over max_restarts, and over the grace."""
    config = one_role("job:stubborn", 1, launch={"max_restarts": 5, "grace_s": 600})
    config["roles"]["failing"] = {"target": "job:wait_for_file", "workers": {"a": 1}}
    with launching(tmp_path, config) as launch:
        launch.until("up w0", "up failing0")
        (tmp_path / "end-failing0").write_text("3")
        launch.until("worker failing0 failed")
        launch.process.send_signal(signal.SIGINT)
        assert launch.code() == 130
        assert "restarting" not in launch.text
        assert not members(tmp_path)


def test_a_burst_of_lines_comes_through_whole(tmp_path: Path) -> None:
    """Lines of several workers, long ones too, are neither lost nor mixed."""
    config = one_role(
        f'{PYTHON} -c \'import os\nfor i in range(5000): print(os.environ["RANK"], i, "x" * 200)\'',
        3,
    )
    with launching(tmp_path, config) as launch:
        assert launch.code() == 0
        for rank in range(3):
            said = [line for line in launch.lines if line.startswith(f"w{rank} | ")]
            assert said == [f"w{rank} | {rank} {i} {'x' * 200}" for i in range(5000)]
