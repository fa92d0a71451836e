"""``mmrpc inspect``: what is in a file of tensors, or what a reference says."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator


def inspect(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|REF",
            help="A file or directory of tensors, a reference as JSON, or a file that holds one.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the tensors of a file, or where a reference points and whether it opens here.

    Exits with 3 if it cannot be opened.
    """
    from mmrpc.errors import MmrpcError

    try:
        text = what if what.lstrip().startswith("{") else _reference_in(what)
        found = _describe_reference(text) if text is not None else _describe_file(what)
    except MmrpcError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(3) from None
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in _lines(found):
            typer.echo(line)
    if found.get("problem"):
        raise typer.Exit(3)


def _reference_in(path: str) -> str | None:
    """Gives the text of a file that holds a reference; None if it holds something else."""
    from mmrpc.core.trees import directory as treedir

    if not path.endswith(".json") or not os.path.isfile(path):
        return None
    return treedir.read_small(path).decode(errors="replace")


def _describe_reference(text: str) -> dict[str, Any]:
    from mmrpc.core.reference import TensorRef
    from mmrpc.errors import PathError

    reference = TensorRef.from_json(text)
    found: dict[str, Any] = {"reference": json.loads(reference.to_json()), "problem": None}
    try:
        found["tensors"] = [_row("", reference.open(mode="r"))]
    except PathError as error:
        found["problem"] = str(error)
    return found


def _describe_file(path: str) -> dict[str, Any]:
    import mmrpc

    tree = mmrpc.load_tree(path) if os.path.isdir(path) else mmrpc.open(path)
    return {"path": os.path.abspath(path), "tensors": list(_rows("", tree)), "problem": None}


def _rows(name: str, value: Any) -> Iterator[dict[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield _row(name, value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _rows(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _rows(f"{name}.{index}" if name else str(index), inner)


def _row(name: str, tensor: Any) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "nbytes": tensor.nbytes,
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    from mmrpc.launch.columns import aligned

    if "reference" in found:
        yield json.dumps(found["reference"], indent=2)
        if found["problem"]:
            yield f"It does not open here: {found['problem']}"
        else:
            yield "It opens here:"
    rows = [
        (row["name"] or "-", row["dtype"], str(row["shape"]), f"{row['nbytes']:,} bytes")
        for row in found.get("tensors", [])
    ]
    yield from aligned(rows)
