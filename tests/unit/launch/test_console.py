"""What the launcher shows."""

from __future__ import annotations

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
