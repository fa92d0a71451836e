"""Names of runs, last lines, and lines cut from what torch's tailers write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmrpc.launch import logs


def test_a_run_is_named_by_job_and_utc() -> None:
    """The name sorts by time and is a safe file name."""
    assert logs.run_name("digits", 0) == "digits-19700101T000000Z"
    assert logs.run_name("a b/../c", 0) == "a-b-..-c-19700101T000000Z"
    assert logs.run_name("..", 0) == "run-19700101T000000Z"


def test_the_tail_is_the_last_lines(tmp_path: Path) -> None:
    """Of a long file only the end is read; of a missing one there is none."""
    file = tmp_path / "log"
    file.write_bytes(b"".join(b"%d\n" % i for i in range(100_000)) + b"\xff end")
    assert logs.tail(str(file), 3) == ["99998", "99999", "\ufffd end"]
    assert logs.tail(str(tmp_path / "nope")) == []


def test_what_the_rpc_agent_says_of_lost_peers_buries_nothing(tmp_path: Path) -> None:
    """It follows the worker's own last words, a line for each call; alone, it is shown."""
    file = tmp_path / "log"
    noise = "[W1130 09:46:01.865 tensorpipe_agent.cpp:723] RPC agent for ps0 encountered error"
    file.write_text("ValueError: mine\n" + f"{noise}\n" * 100 + "[W1130 09:46 other.cpp:1] heard\n")
    assert logs.tail(str(file)) == ["ValueError: mine", "[W1130 09:46 other.cpp:1] heard"]
    file.write_text(f"{noise}\n" * 100)
    assert logs.tail(str(file), 3) == [noise] * 3


def test_a_run_is_removed_with_its_last_part(tmp_path: Path) -> None:
    """A node removes its own part; the directory goes with the last of them."""
    for node in "ab":
        (tmp_path / "run" / node / "w0").mkdir(parents=True)
    logs.remove(str(tmp_path / "run"), "a")
    assert os.listdir(tmp_path / "run") == ["b"]
    logs.remove(str(tmp_path / "run"), "b")
    logs.remove(str(tmp_path / "run"))
    assert os.listdir(tmp_path) == []


def test_halves_of_a_line_are_put_together() -> None:
    """Two workers may be in the middle of a line at the same time."""
    seen: list[tuple[str, str, str]] = []
    sink = logs.Sink("stdout", lambda *line: seen.append(line))
    for worker, text in [
        ("w0", "hel"),
        ("w1", "one\n"),
        ("w0", "lo\n"),
        ("w1", "tw"),
        ("w0", "\n"),
    ]:
        sink.write(logs.header(worker) + text)
    assert seen == [("w1", "stdout", "one"), ("w0", "stdout", "hello"), ("w0", "stdout", "")]
    sink.flush()
    sink.flush()
    assert seen[3:] == [("w1", "stdout", "tw")]


def test_a_tab_in_a_line_stays() -> None:
    """Only the first one ends the header."""
    seen: list[tuple[str, str, str]] = []
    logs.Sink("stderr", lambda *line: seen.append(line)).write(logs.header("w0") + "a\tb\n")
    assert seen == [("w0", "stderr", "a\tb")]


@pytest.mark.parametrize("keep", [False, True])
def test_destinations_are_files_of_each_worker(tmp_path: Path, keep: bool) -> None:
    """Only those to be shown are tailed; a second attempt sets the first one's logs aside."""
    directories = [str(tmp_path / name) for name in ("w0", "w1")]
    for text in ("first", "second"):
        found = logs.specs(directories, [False, True], keep=keep).reify({0: {}, 1: {}})
        Path(found.stdouts[0]).write_text(text)
    assert found.stdouts == {i: os.path.join(d, "stdout.log") for i, d in enumerate(directories)}
    assert found.stderrs == {i: os.path.join(d, "stderr.log") for i, d in enumerate(directories)}
    assert found.tee_stdouts == {1: found.stdouts[1]}
    assert found.tee_stderrs == {1: found.stderrs[1]}
    kept = tmp_path / "w0" / "stdout.0.log"
    assert kept.exists() == keep
    if keep:
        assert kept.read_text() == "first"
