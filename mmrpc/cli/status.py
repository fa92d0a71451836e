"""``mmrpc status``: the workers of a run, from the files that its agents write."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator


def status(
    run_dir: Annotated[Path, typer.Argument(help="Directory of the run.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole document.")] = False,
) -> None:
    """Show the workers of a run: state, uptime, restarts and exit codes."""
    from mmrpc.errors import LaunchError
    from mmrpc.launch import status as documents
    from mmrpc.launch.columns import aligned

    try:
        document = documents.read(str(run_dir))
    except LaunchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"{run_dir.name or run_dir}: {document['state']}")
    if document["cause"]:
        typer.echo(document["cause"])
    rows: list[tuple[str, ...]] = [
        ("RANK", "WORKER", "NODE", "STATE", "UPTIME", "EXIT", "PID", "RESTARTS")
    ]
    rows += sorted(_rows(document), key=lambda row: int(row[0]))
    for line in aligned(rows):
        typer.echo(line)


def _rows(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    from mmrpc.launch.status import uptime_s

    for node, state in document["nodes"].items():
        for name, worker in state.get("workers", {}).items():
            seconds, code = uptime_s(worker), worker["exit_code"]
            yield (
                str(worker["rank"]),
                name,
                node,
                worker["state"],
                "-" if seconds is None else _duration(seconds),
                "-" if code is None else str(code),
                str(worker["pid"]),
                str(state["attempt"]),
            )


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
