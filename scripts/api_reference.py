"""Writes docs/api.md from the signatures and docstrings of what can be imported.

    python -m scripts.api_reference

A test holds the page to the code.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import textwrap
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = Path(__file__).parent.parent / "docs" / "api.md"

_HEAD: Final = """# API

<!-- Written by `python -m scripts.api_reference` from the docstrings: change those instead. -->

Every public name, by task, with the first sentence of its docstring. `help(name)` has the rest:
arguments, units, what is raised, and who owns which file.
"""

# Title, what is said first, module and names; what comes from torch is listed by itself.
GROUPS: Final = [
    (
        "Tensors and references",
        "More in [tensors](tensors.md).",
        {"mmrpc": ["MemoryMappedTensor", "TensorRef", "ref"]},
    ),
    (
        "Files and trees",
        "More in [files](files.md).",
        {"mmrpc": ["open", "save_tree", "load_tree"]},
    ),
    (
        "Calls",
        "`mmrpc.rpc` takes the place of `torch.distributed.rpc`. More in [RPC](rpc.md).",
        {
            "mmrpc.rpc": [
                *("init_rpc", "shutdown", "path_report", "rpc_sync", "rpc_async", "remote", "RRef"),
                *("PyRRef", "Future", "TensorPipeRpcBackendOptions", "message_nbytes"),
            ]
        },
    ),
    (
        "Datasets",
        "More in [datasets](datasets.md).",
        {
            "mmrpc.data": [
                *("MappedDataset", "DatasetWriter", "plan", "RangeWriter", "missing_rows"),
                *("ResumableLoader", "ShardSampler", "SharedDataset", "RemoteDataset", "Column"),
            ]
        },
    ),
    (
        "Training",
        "More in [parameter server](parameter-server.md) and [weight sync](weight-sync.md).",
        {
            "mmrpc.train": [
                *("ParameterServer", "Trainer", "Link", "Pushed", "Progress"),
                *("Publisher", "follow", "Follower", "latest", "Version"),
            ]
        },
    ),
    (
        "Files in mounts",
        "The mounts are those of the cluster that `init_rpc` joined. More in [mounts](mounts.md).",
        {"mmrpc.paths": ["local_copy", "publish", "published", "load_tree"]},
    ),
    (
        "Configs",
        "The keys of a config file are in [config](config.md).",
        {
            "mmrpc.config": [
                *("load_config", "parse_config", "dump_config", "config_hash", "resolve_node"),
                *("settings", "json_schema", "ClusterConfig", "NodeConfig", "MountConfig"),
                *("MasterConfig", "RoleConfig", "RpcConfig", "LaunchConfig", "SshConfig"),
                *("LogsConfig", "Worker", "Setting"),
            ]
        },
    ),
    (
        "Tests",
        "",
        {"mmrpc.testing": ["run_workers", "free_port", "WorkerFailedError", "MountConformance"]},
    ),
]
ROOMS: Final = sorted({module for _, _, modules in GROUPS for module in modules})
_WIDTH: Final = 96


def render() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(line for part in _parts() for line in part)])


def public_names(module: str) -> list[str]:
    """The names of a module that are for users, and defined by mmrpc."""
    room = importlib.import_module(module)
    names = room.__all__ if module != "mmrpc" else [n for n in room.__all__ if n not in _OTHERS]
    return [name for name in names if not _is_torchs(getattr(room, name))]


_OTHERS: Final = ("__version__", "errors")  # a text, and a module with a table of its own


def _parts() -> Iterator[Iterator[str]]:
    for title, said, modules in GROUPS:
        yield _group(title, said, modules)
        if "mmrpc.rpc" in modules:
            yield _of_torch("mmrpc.rpc")
    yield _commands()
    yield _errors()


def _group(title: str, said: str, modules: dict[str, list[str]]) -> Iterator[str]:
    (module,) = modules
    yield f"## {title}: `{module}`\n"
    if said:
        yield f"{said}\n"
    for name in modules[module]:
        yield from _entry(name, getattr(importlib.import_module(module), name))


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`\n"
    if value.__name__ != name:
        yield f"Another name of `{value.__name__}`.\n"
        return
    if not _is_model(value):
        yield f"```py\n{_declaration(name, value)}\n```\n"
    yield f"{first_sentence(value)}\n"
    rows = list(members(value)) if inspect.isclass(value) else []
    if rows:
        yield "| | |\n|---|---|"
        yield from (_row(*row) for row in rows)
        yield ""


def first_sentence(value: Any) -> str:
    """The first sentence of a docstring, in Markdown."""
    return _sentence((inspect.getdoc(value) or "").partition("\n\n")[0])


def _sentence(text: str) -> str:
    first = re.split(r"(?<=[.?!])\s", " ".join(text.split()), maxsplit=1)[0].replace("``", "`")
    return re.sub(r"; see `[^`]+`(?=\.)", "", first)  # from one docstring to another


def _row(code: str, *cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in (f"`{code}`", *cells)) + " |"


# Signatures.


def _declaration(name: str, value: Any, *, typed: bool = True) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = list(_parameters(signature, value, typed=typed))
    result = "" if inspect.isclass(value) or not typed else _annotation(signature.return_annotation)
    arrow = f" -> {result}" if result else ""
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) <= _WIDTH or not typed:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parameters) + f"){arrow}"


def _parameters(signature: inspect.Signature, value: Any, *, typed: bool) -> Iterator[str]:
    kinds = inspect.Parameter
    is_bare = before_slash = False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if before_slash and parameter.kind is not kinds.POSITIONAL_ONLY:
            yield "/"
        before_slash = parameter.kind is kinds.POSITIONAL_ONLY
        if parameter.kind is kinds.VAR_POSITIONAL:
            is_bare = True
        elif parameter.kind is kinds.KEYWORD_ONLY and not is_bare:
            is_bare = True
            yield "*"
        annotation = _annotation(parameter.annotation)
        if annotation.startswith("Unpack["):
            yield from _unpacked(annotation, value, typed=typed)
            continue
        stars = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = f"{stars}{parameter.name}" + (f": {annotation}" if typed and annotation else "")
        if parameter.default is not kinds.empty:
            equals = " = " if ": " in text else "="
            text += equals + _default(parameter.default)
        yield text
    if before_slash:
        yield "/"


def _unpacked(annotation: str, value: Any, *, typed: bool) -> Iterator[str]:
    """The keywords that a `TypedDict` names."""
    function = inspect.unwrap(getattr(value, "__func__", value))
    keywords = function.__globals__[annotation[len("Unpack[") : -1]]
    for name, kind in keywords.__annotations__.items():
        yield f"{name}: {kind.__forward_arg__} = ..." if typed else f"{name}=..."


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    if value is os.environ:
        return "os.environ"
    if isinstance(value, FunctionType | type):
        return value.__name__
    text = repr(value)
    return "..." if " at 0x" in text else text


# Classes.


def members(cls: type) -> Iterator[tuple[str, str]]:
    """Attributes, properties and methods that the class, or a base of it in mmrpc, defines."""
    seen: set[str] = set()
    owners = [owner for owner in cls.__mro__ if owner.__module__.startswith("mmrpc.")]
    for owner in owners:
        for name, text in _attributes(owner):
            if name not in seen:
                seen.add(name)
                yield name, text
    for owner in owners:
        for name, raw in vars(owner).items():
            if name.startswith(("_", "model_")) or name in seen or not _is_member(raw):
                continue
            seen.add(name)
            if isinstance(raw, property):
                yield name, first_sentence(raw)
            else:
                value = getattr(cls, name)
                yield _declaration(name, value, typed=False), first_sentence(value)


def _is_member(raw: Any) -> bool:
    return isinstance(raw, FunctionType | classmethod | staticmethod | property)


def _attributes(cls: type) -> Iterator[tuple[str, str]]:
    """What the section ``Attributes:`` of a docstring lists."""
    if _is_model(cls):
        return  # docs/config.md has the keys
    own = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    section = re.search(r"^Attributes:\n((?:(?:[ ].*)?\n?)+)", own, re.MULTILINE)
    if section is None:
        return
    for name, text in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section[1], re.MULTILINE):
        yield name, _sentence(text)


def _is_model(value: Any) -> bool:
    return inspect.isclass(value) and hasattr(value, "model_fields")


# What is not a list of names of ours.


def _is_torchs(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__ == "mmrpc.rpc.functions"
    return getattr(value, "__module__", None) is None or value.__module__.startswith("torch")


def _of_torch(module: str) -> Iterator[str]:
    room = importlib.import_module(module)
    names = ", ".join(f"`{name}`" for name in room.__all__ if _is_torchs(getattr(room, name)))
    said = f"As in [torch](https://docs.pytorch.org/docs/stable/rpc.html): {names}.\n"
    yield textwrap.fill(said, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def _commands() -> Iterator[str]:
    import click
    from typer.main import get_group

    from mmrpc.cli import app

    group = get_group(app)
    context = click.Context(group)

    yield "## Launching: the command `mmrpc`\n"
    yield "`mmrpc.launch` has no names to import. More in [clusters](clusters.md).\n"
    yield "| | | options |\n|---|---|---|"
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        usage, options = [f"mmrpc {name}"], []
        for parameter in command.params:
            if parameter.param_type_name == "option":
                options.append(f"`{parameter.opts[0]}`")
            else:
                metavar = parameter.metavar or parameter.name.upper()
                usage.append(metavar if parameter.required else f"[{metavar}]")
        yield _row(" ".join(usage), _sentence(command.help), ", ".join(options))
    yield ""


def _errors() -> Iterator[str]:
    from mmrpc import errors

    yield "## Errors: `mmrpc.errors`\n"
    yield "What to do about each is in [errors](errors.md).\n"
    yield "| | also | adds | |\n|---|---|---|---|"
    for name, cls in vars(errors).items():
        if not (inspect.isclass(cls) and issubclass(cls, errors.MmrpcError)):
            continue
        parents = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        inherited = {f for base in cls.__bases__ for f in getattr(base, "fields", ())}
        adds = ", ".join(f"`{field}`" for field in cls.fields if field not in inherited)
        yield _row(name, parents, adds, first_sentence(cls))


if __name__ == "__main__":
    PAGE.write_text(render() + "\n")
