"""The shim that every worker begins as."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = [sys.executable, "-m", "mmrpc.launch.worker"]


def _run(directory: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SHIM, *words], cwd=directory, input=stdin, capture_output=True, text=True, timeout=60
    )


def _job(directory: Path, body: str) -> None:
    (directory / "job.py").write_text(f"import sys\n{body}\n")


def test_a_function_sees_its_arguments(tmp_path: Path) -> None:
    """As `sys.argv`, after its own name; it may be an attribute of a class."""
    _job(tmp_path, "class Job:\n    @staticmethod\n    def run():\n        print(sys.argv)")
    done = _run(tmp_path, "job:Job.run", "--lr", "1")
    assert (done.returncode, done.stdout) == (0, "['job:Job.run', '--lr', '1']\n")


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        ("def main(): sys.exit(7)", 7, ""),
        ("def main(): raise ValueError('no')", 1, "ValueError: no"),
        ("def main(): raise KeyboardInterrupt", 130, ""),
        ("import nope", 1, "ModuleNotFoundError: No module named 'nope'"),
    ],
)
def test_the_exit_code_is_the_functions(tmp_path: Path, body: str, code: int, last: str) -> None:
    """An exception is 1, with its traceback; Ctrl-C is the shell's 130."""
    _job(tmp_path, body)
    done = _run(tmp_path, "job:main")
    assert done.returncode == code
    assert done.stderr.strip().splitlines()[-1:] == ([last] if last else [])


def test_a_traceback_begins_in_the_job(tmp_path: Path) -> None:
    """How the shim came to call it is of no use to its author."""
    _job(tmp_path, "def main(): raise ValueError('no')")
    done = _run(tmp_path, "job:main")
    assert "mmrpc" not in done.stderr
    assert "in main" in done.stderr


@pytest.mark.parametrize("name", ["maine", "Job.runn"])
def test_a_function_that_is_not_there_is_told_with_those_that_are(
    tmp_path: Path, name: str
) -> None:
    """One sentence instead of a traceback, and imported names are not offered."""
    _job(tmp_path, "from os import path\ndef main(): pass\nclass Job:\n    def run(self): pass")
    done = _run(tmp_path, f"job:{name}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"mmrpc: no target 'job:{name}': in ")
    assert done.stderr.count("\n") == 1
    meant = "run" if "." in name else "main"
    assert done.stderr.endswith(f"did you mean {meant!r}?\n")
    assert "path" not in done.stderr.partition("known")[2]


def test_a_verdict_on_the_cluster_comes_without_a_traceback(tmp_path: Path) -> None:
    """Where in the code a handshake failed is nothing that a user could mend."""
    _job(
        tmp_path,
        "from mmrpc.errors import HandshakeError\n"
        "def main():\n"
        "    error = HandshakeError('no mount', node='b', hint='Mount it.')\n"
        "    error.add_note('also on c')\n"
        "    raise error",
    )
    done = _run(tmp_path, "job:main")
    assert done.returncode == 1
    assert done.stderr == "mmrpc: on b: no mount. Mount it.\nalso on c\n"


def test_a_command_takes_the_shims_place(tmp_path: Path) -> None:
    """Its exit code is its own, and it does not read the agent's channel."""
    me = str(os.getpid())
    done = _run(tmp_path, "--exec", me, "sh", "-c", "cat; exit 5", stdin="commands for the agent")
    assert (done.returncode, done.stdout) == (5, "")


def test_one_warning_of_torch_is_no_news(tmp_path: Path) -> None:
    """It is left out; others are shown, and what the user has set holds."""
    program = (
        "import warnings\n"
        "warnings.warn('You are using a Backend <x> as a ProcessGroup')\n"
        "warnings.warn('mind the gap')"
    )
    command = ["--exec", str(os.getpid()), sys.executable, "-c", program]
    assert "Backend" not in _run(tmp_path, *command).stderr
    assert "mind the gap" in _run(tmp_path, *command).stderr
    environment = {**os.environ, "PYTHONWARNINGS": "always"}
    done = subprocess.run(
        [*SHIM, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "Backend" in done.stderr


@pytest.mark.parametrize(("command", "code"), [("./nope", 127), ("./plain", 126)])
def test_a_command_that_cannot_run_has_the_shells_code(
    tmp_path: Path, command: str, code: int
) -> None:
    """And says which it was."""
    (tmp_path / "plain").write_text("")
    done = _run(tmp_path, "--exec", str(os.getpid()), command)
    assert done.returncode == code
    assert f"cannot run {command!r}" in done.stderr


def test_a_worker_whose_agent_is_gone_ends_at_once(tmp_path: Path) -> None:
    """The agent may die before the worker could tie its life to it."""
    done = _run(tmp_path, "--exec", "1", "sh", "-c", "echo started")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
