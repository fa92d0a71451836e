"""The documents: links lead somewhere, programs run, tables are complete."""

from __future__ import annotations

import builtins
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from mmrpc import errors, testing
from mmrpc.cli import app
from mmrpc.config import load_config
from tests.documents import DOCUMENTS, ROOT, blocks, run


def marked(language: str) -> list[Any]:
    """The blocks of a language in all documents but the README."""
    return [
        pytest.param(text, id=f"{document.name}-{number}")
        for document in DOCUMENTS
        if document.name != "README.md"
        for number, text in enumerate(blocks(document, language))
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document) -> None:
    """A relative link is a file of the repository."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("program", marked("python"))
def test_program_runs(program: str, tmp_path) -> None:
    """A block that is marked as Python is a program that ends well, again and again."""
    run(program, tmp_path)
    run(program, tmp_path)


@pytest.mark.parametrize("config", marked("yaml"))
def test_config_loads(config: str, tmp_path) -> None:
    """A block that is marked as YAML is a valid config."""
    file = tmp_path / "cluster.yaml"
    file.write_text(config)
    assert load_config(file).nodes


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(document) -> None:
    """A command of mmrpc that a document names is one."""
    named = set(re.findall(r"`mmrpc ([a-z]+)\b", document.read_text()))
    for command in named:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document) -> None:
    """A test that a document names as proof is there."""
    for path, name in re.findall(
        r"`(tests/(?:unit|distributed)/[\w/]+\.py)(?:::(\w+))?`", document.read_text()
    ):
        file = ROOT / path
        assert file.exists(), path
        assert not name or f"def {name}(" in file.read_text(), name


def test_errors_are_all_explained() -> None:
    """docs/errors.md names every error, and none that does not exist."""
    text = (ROOT / "docs/errors.md").read_text()
    real = {n for n, v in vars(errors).items() if inspect.isclass(v) and n.endswith("Error")}
    named = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    assert named | {"MmrpcError", "PathError", "RpcError"} == real


def test_errors_named_in_documents_exist() -> None:
    """No document promises an error that nobody can catch."""
    for document in DOCUMENTS:
        for name in re.findall(r"`(\w+Error)`", document.read_text()):
            places = (errors, builtins, testing)
            assert any(hasattr(place, name) for place in places), (document.name, name)


def test_recipe_of_a_directory_that_is_not_shared(tmp_path) -> None:
    """What the recipe quotes is what `mmrpc check` says, with other paths."""
    for node in "ab":
        (tmp_path / node).mkdir()
    config = {
        "name": "two",
        "mounts": {"params": {"access": "write"}},
        "nodes": {
            node: {"host": "127.0.0.1", "mounts": {"params": str(tmp_path / node)}} for node in "ab"
        },
    }
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "mmrpc.cli", "check", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    (said,) = re.findall(r"^on b: .*", done.stdout + done.stderr, re.MULTILINE)
    quoted = next(b for b in blocks(ROOT / "docs/recipes.md", "text") if b.startswith("on b:"))
    assert without_places(said) == without_places(quoted)
    assert done.returncode == 3


def without_places(message: str) -> str:
    """A message without what differs from place to place: paths and line numbers."""
    return re.sub(r"'/[^']*'|\[[^]]*\]", "", " ".join(message.split()))


def test_changelog_names_what_is_public() -> None:
    """Each name with a module in the changelog can be imported from there."""
    named = re.findall(r"`(mmrpc(?:\.\w+)+)`", (ROOT / "CHANGELOG.md").read_text())
    assert named
    for name in named:
        assert pkgutil.resolve_name(name) is not None
