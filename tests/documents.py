"""The documents of the project, and the programs in them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(document: Path, language: str) -> list[str]:
    """The blocks of a document that are marked with a language."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, document.read_text(), re.MULTILINE | re.DOTALL)


def run(program: str, directory: Path) -> str:
    """Runs a program as a script in a directory; gives what it prints."""
    script = directory / "example.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", script.name],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
