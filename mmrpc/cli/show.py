"""``mmrpc show``: a config as it is used, each value with where it came from."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import Annotated

import typer


def show(
    config: Annotated[Path, typer.Argument(help="The cluster's config.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Overrides a value; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Print every value of CONFIG and where it came from: a default, a line, or --set.

    Values of variables whose names say that they are secret are hidden.
    """
    from mmrpc.config import config_hash, load_config, settings

    cluster = load_config(config, overrides or [])
    found = settings(cluster)
    if as_json:
        rows = [{"key": s.key, "value": s.value, "source": s.source} for s in found]
        typer.echo(json.dumps(rows, indent=2))
        return
    texts = [f"{s.key} = {json.dumps(s.value, ensure_ascii=False)}" for s in found]
    width = max(map(len, texts))
    for text, setting in zip(texts, found, strict=True):
        typer.echo(f"{text.ljust(width)}  # {setting.source}")
    for worker in cluster.workers():
        typer.echo(f"# rank {worker.rank}: {worker.name} on {worker.node}")
    typer.echo(f"# hash {config_hash(cluster)}")
