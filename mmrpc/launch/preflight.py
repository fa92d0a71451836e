"""What an agent can see before any worker starts: each problem is a sentence."""

from __future__ import annotations

import importlib.machinery
import ipaddress
import os
import shutil
import socket
import sys
from typing import TYPE_CHECKING

from mmrpc.launch import target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mmrpc.launch.plan import Run, WorkerPlan


def enter(directory: str, node: str) -> list[str]:
    """Makes a directory the working directory, also for imports."""
    try:
        os.chdir(directory)
    except OSError as error:
        return [
            f"cannot enter the working directory {directory!r}: {_text(error)}. "
            f"Set nodes.{node}.cwd."
        ]
    return []


def problems(run: Run, node: str, plans: list[WorkerPlan]) -> list[str]:
    """Looks at everything that a node's workers will need.

    Args:
        run: The run.
        node: This node.
        plans: Its workers; the working directory is theirs.
    """
    return [
        *dict.fromkeys(  # workers of one role share their problems
            [
                *_check_torch(),
                *(text for plan in plans for text in _check_target(run, node, plan)),
                *_check_master(run, node),
                *_check_interface(run, node),
                *_check_directories(run, node),
            ]
        )
    ]


def _text(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _check_torch() -> Iterator[str]:
    if importlib.machinery.PathFinder.find_spec("torch") is None:
        yield f"{sys.executable} has no torch. Install it there, or set another python."


def _check_target(run: Run, node: str, plan: WorkerPlan) -> Iterator[str]:
    text = run.cluster.roles[plan.worker.role].target
    where, what = f"roles.{plan.worker.role}.target", target.parse(text)
    env = {**os.environ, **plan.env}
    if what.kind == "function":
        package = what.words[0].partition(".")[0]
        path = [os.getcwd(), *env.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
        if importlib.machinery.PathFinder.find_spec(package, path) is None:
            yield (
                f"there is no module {package!r} for {where} in {os.getcwd()!r} or on the path of "
                f"{sys.executable}. Set nodes.{node}.cwd, or PYTHONPATH in nodes.{node}.env."
            )
    elif what.kind == "script":
        if not os.path.isfile(what.words[0]):
            yield f"there is no script {what.words[0]!r} in {os.getcwd()!r}. Mend {where}."
    elif shutil.which(what.words[0], path=_search_path(env)) is None:
        yield f"there is no program {what.words[0]!r} on PATH. Mend {where}."


def _search_path(env: Mapping[str, str]) -> str | None:
    return env.get("PATH")


def _check_master(run: Run, node: str) -> Iterator[str]:
    cluster = run.cluster
    if cluster.is_one_host():
        return
    master = cluster.master.node
    host = cluster.nodes[master].host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        yield (
            f"cannot resolve the master's host {host!r}: {_text(error)}. Mend nodes.{master}.host."
        )
        return
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    others = [cluster.nodes[name].host for name in run.nodes() if name != master]
    if addresses[0].is_loopback and not all(_is_loopback(other) for other in others):
        yield (
            f"the master's host {host!r} resolves to {addresses[0]}, which each node takes for "
            f"itself. Give nodes.{master}.host an address that the others can reach, "
            "or mend /etc/hosts."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_interface(run: Run, node: str) -> Iterator[str]:
    name = run.cluster.nodes[node].interface
    known = sorted(name for _, name in socket.if_nameindex())
    if name is not None and name not in known:
        yield (
            f"there is no network interface {name!r} (there are {', '.join(known)}). "
            f"Mend nodes.{node}.interface."
        )


def _check_directories(run: Run, node: str) -> Iterator[str]:
    config = run.cluster.nodes[node]
    for key, path in (("log directory", run.directory(node)), ("cache_dir", config.cache_dir)):
        if path is None:
            continue
        existing = path
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
            yield f"cannot write to {existing!r}, where the {key} {path!r} would be."
