"""The package as a whole: public names, what importing costs, and which room knows which."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import mmrpc

ROOT = Path(mmrpc.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path.name != "__main__.py"  # which runs when imported
)
PUBLIC = {
    "MemoryMappedTensor",
    "TensorRef",
    "__version__",
    "errors",
    "load_tree",
    "open",
    "ref",
    "save_tree",
}
HEAVY = {"aiohttp", "asyncssh", "fsspec", "numpy", "pydantic", "rich", "ruamel", "s3fs", "sshfs"}


@functools.cache
def loaded_by(statement: str) -> frozenset[str]:
    """Names of the modules that a fresh interpreter holds after a statement."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {statement}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return frozenset(done.stdout.split())


def source(module: str) -> str:
    """Text of a module."""
    path = ROOT.parent / Path(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def imports_at_top(module: str) -> set[str]:
    """Absolute names that importing a module imports, apart from those for type checkers."""
    tree = ast.parse(source(module))
    found: set[str] = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        todo += ast.iter_child_nodes(node)
    return found


def test_public_list_is_what_is_promised() -> None:
    """The public list changes on purpose only."""
    assert set(mmrpc.__all__) == PUBLIC
    assert set(dir(mmrpc)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_is_importable(name: str) -> None:
    """Each public name exists, is the one of its module, and stays the same object."""
    value = getattr(mmrpc, name)
    assert value is getattr(mmrpc, name)
    if home := mmrpc._HOME.get(name):
        assert value is getattr(importlib.import_module(home), name)
        assert value.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as it does for any module."""
    with pytest.raises(AttributeError, match="module 'mmrpc' has no attribute 'MemmapTensor'"):
        mmrpc.MemmapTensor  # noqa: B018


@pytest.mark.parametrize("module", MODULES)
def test_module_is_importable_and_says_what_it_is(module: str) -> None:
    """Every module can be imported, begins with a docstring, and has what its __all__ lists."""
    loaded = importlib.import_module(module)
    assert loaded.__doc__
    assert not [name for name in getattr(loaded, "__all__", ()) if not hasattr(loaded, name)]


def test_import_mmrpc_loads_nothing_else() -> None:
    """Importing the package alone costs neither torch nor any library."""
    loaded = loaded_by("import mmrpc, mmrpc.errors")
    assert not {"torch", *HEAVY} & loaded


@pytest.mark.parametrize(
    "statement",
    [
        "from mmrpc import MemoryMappedTensor, TensorRef, ref",
        "import pickle, mmrpc; pickle.dumps(mmrpc.MemoryMappedTensor.zeros(3)[1:].ref())",
        "import mmrpc.rpc",
    ],
)
def test_import_costs_what_torch_costs(statement: str) -> None:
    """The core and RPC load nothing heavy that `import torch` does not load."""
    torch_alone = loaded_by("import torch, torch.distributed.rpc")
    extra = loaded_by(statement) - torch_alone
    assert not {name for name in extra if name.split(".")[0] in HEAVY}
    assert not {name for name in extra if name.startswith(("torch._dynamo", "torch._inductor"))}


def test_rpc_stays_behind_its_room() -> None:
    """The rooms below mmrpc.rpc do not import torch's RPC, so that it can be replaced."""
    below = ("mmrpc.core", "mmrpc.paths", "mmrpc.config", "mmrpc.errors")
    for module in (name for name in MODULES if name.startswith(below)):
        assert not [n for n in imports_at_top(module) if n.startswith("torch.distributed.rpc")]


def test_arrows_point_one_way() -> None:
    """import-linter finds the contracts of pyproject.toml kept."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout


def test_files_stay_small() -> None:
    """A file that passes 500 lines holds more than one idea."""
    assert not [name for name in MODULES if len(source(name).splitlines()) > 500]
