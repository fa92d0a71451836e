"""``mmrpc launch``: starts a cluster from one file, and sees it to its end."""

from __future__ import annotations

import os
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mmrpc.config import ClusterConfig


def launch(
    config: Annotated[Path, typer.Argument(help="The cluster's config.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="After --: appended to each worker's command line."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Overrides a value; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print and check everything; start no worker.")
    ] = False,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", help="Print a batch script for Slurm.")
    ] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="With --sbatch: hand the script to sbatch.")
    ] = False,
) -> None:
    """Start the workers of CONFIG on all its nodes and wait for their end.

    The exit code is that of the first worker that fails, or 128 + the signal that ended it.
    """
    from mmrpc.config import load_config

    given = overrides or []
    if submit and not sbatch:
        raise typer.BadParameter("--submit needs --sbatch")
    if sbatch:
        # The launcher in the batch job is in an allocation, whatever the file says.
        given = [*given, "launch.via=slurm"]
    cluster = load_config(config, set=given)
    if sbatch:
        _batch(cluster, config, given, arguments or [], submit=submit)
    elif dry_run:
        _rehearse(cluster, arguments or [])
    else:
        _launch(cluster, arguments or [])


def _launch(cluster: ClusterConfig, arguments: list[str]) -> None:
    from mmrpc.errors import LaunchError
    from mmrpc.launch import causes
    from mmrpc.launch.launcher import Launcher

    try:
        Launcher(cluster, tuple(arguments)).launch()
    except LaunchError as error:
        typer.echo(causes.screen(error), err=True)
        raise typer.Exit(error.exit_code or 1) from None


def _rehearse(cluster: ClusterConfig, arguments: list[str]) -> None:
    from mmrpc.errors import LaunchError
    from mmrpc.launch import causes
    from mmrpc.launch.describe import describe
    from mmrpc.launch.launcher import Launcher

    try:
        launcher = Launcher(cluster, tuple(arguments), check_only=True)
        typer.echo(describe(launcher.run, launcher.slurm_nodes))
        launcher.launch()
    except LaunchError as error:
        typer.echo(f"\nchecks: failed\n{causes.screen(error)}")
        raise typer.Exit(error.exit_code or 1) from None
    unseen = [node for node in launcher.run.nodes() if node not in launcher.reached]
    typer.echo("\nchecks: passed")
    for node, ready in launcher.reached.items():
        typer.echo(f"  {node}: {ready.hostname}, {ready.python}")
    if unseen:
        typer.echo(f"  not seen, since their agents are started by hand: {', '.join(unseen)}")


def _batch(
    cluster: ClusterConfig,
    config: Path,
    overrides: list[str],
    arguments: list[str],
    *,
    submit: bool,
) -> None:
    from mmrpc.launch import slurm

    words = [str(config.resolve()), *(f"--set={text}" for text in overrides)]
    words += ["--", *arguments] if arguments else []
    script = slurm.script(cluster, words, os.getcwd())
    typer.echo(slurm.submit(script) if submit else script, nl=submit)
