"""The tests' own ground: needs, skips and leaks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.needs import PARTS, missing, needs


@pytest.mark.parametrize("part", PARTS)
def test_probe_says_what_is_missing(part: str) -> None:
    """Every probe ends, and gives None or a text."""
    assert missing(part) is None or missing(part)


def test_unknown_part_is_an_error() -> None:
    """A misspelt part would skip nothing, or everything."""
    with pytest.raises(ValueError, match="unknown part 'ssh'"):
        needs("ssh")


def test_leaked_child_fails_the_test(pytester_run) -> None:
    """A test that leaves a process behind fails, and the process is gone."""
    result = pytester_run(
        """
        import subprocess, sys
        def test_leak():
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        """
    )
    assert "the test left behind process" in result.stdout, result.stdout
    assert result.returncode == 1


def test_leaked_orphan_fails_the_test(pytester_run) -> None:
    """Also a process whose parent has ended is found."""
    result = pytester_run(
        """
        import subprocess
        def test_leak():
            subprocess.run(["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 &"], check=True)
        """
    )
    assert "the test left behind process" in result.stdout, result.stdout


def test_leaked_shared_memory_fails_the_test(pytester_run) -> None:
    """A file that a test leaves in /dev/shm is told by name."""
    result = pytester_run(
        """
        import os
        def test_leak():
            open(f"/dev/shm/mmrpc-leak-{os.getpid()}", "w").close()
        def test_clean_up():
            os.unlink(f"/dev/shm/mmrpc-leak-{os.getpid()}")
        """,
        MMRPC_REQUIRE_ALL="1",
    )
    assert "the test left behind /dev/shm/mmrpc-leak-" in result.stdout, result.stdout


def test_shared_memory_may_be_another_runs(pytester_run) -> None:
    """While another run is under way, as the outer one is here, a file tells of no leak."""
    result = pytester_run(
        """
        import os
        conftest._IS_INNER = False
        def test_no_leak():
            open(f"/dev/shm/mmrpc-leak-{os.getpid()}", "w").close()
        def test_clean_up():
            os.unlink(f"/dev/shm/mmrpc-leak-{os.getpid()}")
        """,
        MMRPC_REQUIRE_ALL="1",
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("require", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_skip_fails_where_all_is_required(pytester_run, require: str, outcome: str) -> None:
    """MMRPC_REQUIRE_ALL=1 turns a skip for a missing part into a failure."""
    result = pytester_run(
        """
        import pytest
        from tests import needs as parts
        parts.PARTS["moon"] = lambda: "no moon on this machine"
        @parts.needs("moon")
        def test_moon(): pass
        """,
        MMRPC_REQUIRE_ALL=require,
    )
    assert outcome in result.stdout, result.stdout
    assert "no moon on this machine" in result.stdout


def test_skipped_module_fails_where_all_is_required(pytester_run) -> None:
    """A module that skips itself is no way around."""
    result = pytester_run("import pytest; pytest.importorskip('no_such')", MMRPC_REQUIRE_ALL="1")
    assert "MMRPC_REQUIRE_ALL=1, and skipped" in result.stdout, result.stdout
    assert result.returncode != 0


@pytest.fixture
def pytester_run(tmp_path, pytestconfig):
    """Runs pytest on a text as a test module, under this project's configuration."""

    def run(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
        module = tmp_path / "test_inner.py"
        # What is left is left for good: no grace changes that.
        no_grace = "from tests import conftest\nconftest._GRACE_S = 0.1\n"
        module.write_text(no_grace + textwrap.dedent(text))
        command = [
            sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider",
            f"--rootdir={pytestconfig.rootpath}", f"-c={pytestconfig.inipath}", str(module),
        ]  # fmt: skip
        return subprocess.run(
            command,
            cwd=pytestconfig.rootpath,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run
