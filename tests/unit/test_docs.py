"""The documents: links lead somewhere, programs run, tables are complete."""

from __future__ import annotations

import inspect
import re

import pytest

from mmrpc import errors
from tests.documents import DOCUMENTS, ROOT, programs, run

PROGRAMS = [
    pytest.param(text, id=f"{document.name}-{number}")
    for document in DOCUMENTS
    if document.name != "README.md"
    for number, text in enumerate(programs(document))
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document) -> None:
    """A relative link is a file of the repository."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program: str, tmp_path) -> None:
    """A block that is marked as Python is a program that ends well."""
    run(program, tmp_path)


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
    import builtins

    for document in DOCUMENTS:
        for name in re.findall(r"`(\w+Error)`", document.read_text()):
            assert hasattr(errors, name) or hasattr(builtins, name), (document.name, name)
