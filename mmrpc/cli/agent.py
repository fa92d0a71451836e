"""``mmrpc agent``: takes part in a launch from a node that the launcher cannot reach."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it
from typing import Annotated

import typer


def agent(
    config: Annotated[Path, typer.Argument(help="The cluster's config.", show_default=False)],
    node: Annotated[
        str | None,
        typer.Option("--node", help="This node's name, if nothing else tells.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Overrides a value; may be repeated."),
    ] = None,
) -> None:
    """Run this node's workers, by hand: one agent per node.

    The agent of the master's node is the launcher as well; the others wait for it.
    """
    from mmrpc.cli.launch import launch
    from mmrpc.config import load_config, resolve_node
    from mmrpc.errors import LaunchError
    from mmrpc.launch import causes, join

    given = [*(overrides or []), "launch.via=manual"]
    cluster = load_config(config, set=given)
    name = resolve_node(cluster, node)
    if name == cluster.master.node:
        launch(config, overrides=given)
        return
    master = cluster.nodes[cluster.master.node].host
    typer.echo(f"agent of {name}: looks for {master}:{cluster.master.port}", err=True)
    try:
        code = join.serve(cluster, name)
    except LaunchError as error:
        typer.echo(causes.screen(error), err=True)
        raise typer.Exit(error.exit_code or 1) from None
    raise typer.Exit(code)
