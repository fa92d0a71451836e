"""What the launcher shows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mmrpc.launch.console import Console


def test_lines_have_one_width_and_keep_their_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """Names are padded to the longest, and stderr stays stderr."""
    console = Console(["ps0", "trainer11"])
    console.line("ps0", "ready")
    console.line("trainer11", "trouble", "stderr")
    console.say("two\nlines")
    captured = capsys.readouterr()
    assert captured.out == "ps0       | ready\n"
    assert captured.err == "trainer11 | trouble\nmmrpc: two\nmmrpc: lines\n"


def test_a_reader_that_goes_away_is_told_once() -> None:
    """The first line raises; the launcher's last words and its exit are undisturbed."""
    program = (
        "import sys\nfrom mmrpc.launch.console import Console\nconsole = Console(['w'])\n"
        "sys.stdin.read()\n"
        "try:\n    console.line('w', 'x')\nexcept BrokenPipeError:\n    told = True\n"
        "console.line('w', 'y')\nconsole.say('bye')\nsys.exit(7 if told else 1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert err == b"mmrpc: bye\n"


def test_a_full_disk_does_not_end_the_job() -> None:
    """Lines that cannot be written are dropped, and the exit code is the launcher's own."""
    program = (
        "import sys\nfrom mmrpc.launch.console import Console\nconsole = Console(['w'])\n"
        "for _ in range(3):\n    console.line('w', 'x')\nsys.exit(7)\n"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (7, b"")


def test_what_the_locale_cannot_show_is_escaped() -> None:
    """Neither a letter that ASCII lacks nor half of a surrogate pair ends the launcher."""
    program = "from mmrpc.launch.console import Console\nConsole([]).line('w', 'd\\u00eda \\ud800')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == b"w | d\\xeda \\ud800\n"
