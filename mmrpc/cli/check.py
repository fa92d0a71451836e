"""``mmrpc check``: can every node read and write what the config says, and is it the same?"""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mmrpc.config import ClusterConfig

FAILED = 3
"""Exit code if a path failed."""
_COLUMNS = ("MOUNT", "NODE", "READ", "WRITE", "SAME", "FREE", "READER", "FILE SYSTEM", "PATH")


def check(
    config: Annotated[Path, typer.Argument(help="The cluster's config.", show_default=False)],
    node: Annotated[
        str | None,
        typer.Option("--node", help="Check this machine alone, as that node.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Overrides a value; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    write_id: Annotated[
        bool,
        typer.Option(
            "--write-id",
            help="Make the id file of each read mount of this node, by which others know it.",
        ),
    ] = False,
) -> None:
    """Check CONFIG, then every mount: on all nodes and against each other, or with --node on one.

    Exits with 0 if all is well, 2 if the config is wrong, 3 if a path failed.
    """
    from mmrpc.config import load_config, resolve_node

    cluster = load_config(config, overrides or [])
    if write_id:
        node = resolve_node(cluster, node)
        _write_ids(cluster, node)
    if node is not None or cluster.launch.via == "manual":
        found = _check_here(cluster, resolve_node(cluster, node))
    else:
        found = _check_all(cluster)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)
    if found["problems"]:
        raise typer.Exit(FAILED)


def _write_ids(cluster: ClusterConfig, node: str) -> None:
    from mmrpc.errors import PathError
    from mmrpc.paths.mounts import MountTable
    from mmrpc.rpc.handshake import nonce

    for mount in MountTable.from_config(cluster, node):
        if mount.access == "write":
            continue  # proven by a file that is written at each start
        try:
            text = nonce.write_id(mount, node)
        except PathError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(FAILED) from None
        typer.echo(f"{mount.root}/{nonce.ID_FILE}: {text}", err=True)


def _check_here(cluster: ClusterConfig, node: str) -> dict[str, Any]:
    from mmrpc.rpc.handshake.probe import probe_node

    mounts = probe_node(cluster, node)
    return {
        "problems": [m.problem.sentence() for m in mounts if m.problem is not None],
        "nodes": [],
        "mounts": [m.model_dump(mode="json") for m in mounts],
        "warnings": [],
    }


def _check_all(cluster: ClusterConfig) -> dict[str, Any]:
    from mmrpc.cli import survey
    from mmrpc.errors import LaunchError
    from mmrpc.launch import causes

    try:
        return survey.everywhere(cluster)
    except LaunchError as error:
        typer.echo(causes.screen(error), err=True)
        raise typer.Exit(error.exit_code or 1) from None


def _print(found: dict[str, Any]) -> None:
    from mmrpc.launch.columns import aligned

    rows = [_COLUMNS, *map(_row, found["mounts"])]
    are_bad = [False, *(row["problem"] is not None for row in found["mounts"])]
    if found["mounts"]:
        for line, is_bad in zip(aligned(rows), are_bad, strict=True):
            typer.secho(line, fg="red" if is_bad else None)
    for text in found.get("warnings", []):
        typer.secho(f"warning: {text}", fg="yellow")
    for text in found["problems"]:
        typer.secho(text, fg="red")
    if not found["problems"]:
        typer.echo("All is well.")


def _row(mount: dict[str, Any]) -> tuple[str, ...]:
    return (
        mount["mount"],
        mount["node"],
        _yes(mount["readable"]),
        _yes(mount["writable"]),
        mount["proof"] or _yes(mount["same_as_others"]),
        _size(mount["free_bytes"]),
        mount["reader"] or "-",
        mount["implementation"] or mount["file_system"],
        mount["path"],
    )


def _yes(value: bool | None) -> str:
    return "?" if value is None else "yes" if value else "no"


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}"
