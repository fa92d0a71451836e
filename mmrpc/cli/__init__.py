"""The command line: one module per command, imported when it is the one that is run."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_COMMANDS = ("check", "show", "launch", "agent", "status", "inspect", "schema")


class _Lazy(TyperGroup):
    """Finds the command ``x`` as the function ``x`` of ``mmrpc.cli.x``."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of a job's life."""
        return list(_COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        """Imports one command."""
        if name not in _COMMANDS:
            return None
        command = typer.Typer(add_completion=False)
        command.command(name)(getattr(importlib.import_module(f"{__name__}.{name}"), name))
        return typer.main.get_command(command)

    def invoke(self, ctx: Any) -> Any:
        """Tells an error of ours as the sentence that it is: 2 for a config, else 1."""
        from mmrpc.errors import ConfigError, MmrpcError

        try:
            return super().invoke(ctx)
        except MmrpcError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


app = typer.Typer(cls=_Lazy, no_args_is_help=True, add_completion=False)


def _version(is_asked: bool) -> None:
    if is_asked:
        from mmrpc import __version__

        typer.echo(f"mmrpc {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Tensors shared across processes and nodes by reference."""
