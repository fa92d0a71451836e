"""``mmrpc schema``: the JSON Schema of a config, for editors."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON Schema of a cluster's config, for editors to complete and check it."""
    from mmrpc.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
