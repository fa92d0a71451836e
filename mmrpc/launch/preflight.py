"""What an agent can see before any worker starts."""

from __future__ import annotations

import errno
import importlib.machinery
import ipaddress
import os
import shutil
import socket
import sys
from typing import TYPE_CHECKING, NamedTuple

from mmrpc.launch import target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mmrpc.launch.plan import Run, WorkerPlan


class Problem(NamedTuple):
    """Something that would keep a worker from its work.

    Attributes:
        reason: A clause without a final period.
        hint: A sentence.
    """

    reason: str
    hint: str


def enter(directory: str, node: str) -> list[Problem]:
    """Makes a directory the working directory of this process."""
    try:
        os.chdir(directory)
    except OSError as error:
        reason = f"cannot enter the working directory {directory!r}: {_text(error)}"
        return [Problem(reason, f"Set nodes.{node}.cwd.")]
    return []


def find_problems(run: Run, node: str, plans: list[WorkerPlan]) -> list[Problem]:
    """Looks at everything that a node's workers will need.

    Args:
        run: The run.
        node: This node.
        plans: Its workers; the working directory is theirs.
    """
    found = [
        *_check_torch(node),
        *(problem for plan in plans for problem in _check_target(run, node, plan)),
        *_check_master(run, node),
        *_check_port(run, node),
        *_check_interface(run, node),
        *_check_directories(run, node),
    ]
    return list(dict.fromkeys(found))  # workers of one role share theirs


def find_mount_problems(run: Run, node: str) -> list[Problem]:
    """Looks at a node's mounts, which workers look at themselves when they are started."""
    from mmrpc.rpc.handshake.probe import probe_node

    found = (report.problem for report in probe_node(run.cluster, node))
    return [Problem(problem.clause(), problem.hint or "") for problem in found if problem]


def _text(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _check_torch(node: str) -> Iterator[Problem]:
    if importlib.machinery.PathFinder.find_spec("torch") is None:
        yield Problem(
            f"{sys.executable} has no torch", f"Install it there, or set nodes.{node}.python."
        )


def _check_target(run: Run, node: str, plan: WorkerPlan) -> Iterator[Problem]:
    key = f"roles.{plan.worker.role}.target"
    what = target.parse(run.cluster.roles[plan.worker.role].target)
    env = {**os.environ, **plan.env}
    if what.kind == "function":
        package = what.words[0].partition(".")[0]
        path = [os.getcwd(), *env.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
        if importlib.machinery.PathFinder.find_spec(package, path) is None:
            yield Problem(
                f"there is no module {package!r} in {os.getcwd()!r} or on the path of "
                f"{sys.executable}",
                f"Mend {key}, nodes.{node}.cwd, or PYTHONPATH in nodes.{node}.env.",
            )
    elif what.kind == "script":
        if not os.path.isfile(what.words[0]):
            yield Problem(
                f"there is no script {what.words[0]!r} in {os.getcwd()!r}", f"Mend {key}."
            )
    elif shutil.which(what.words[0], path=env.get("PATH")) is None:
        yield Problem(f"there is no program {what.words[0]!r}", f"Mend {key}.")


def _check_master(run: Run, node: str) -> Iterator[Problem]:
    """A name that each node takes for itself is the classic that makes a cluster hang."""
    cluster = run.cluster
    if cluster.is_one_host():
        return
    master = cluster.master.node
    host = cluster.nodes[master].host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        yield Problem(
            f"cannot resolve the master's host {host!r}: {_text(error)}",
            f"Mend nodes.{master}.host.",
        )
        return
    address = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])
    others = [cluster.nodes[name].host for name in run.nodes() if name != master]
    if address.is_loopback and not all(map(_is_loopback, others)):
        yield Problem(
            f"the master's host {host!r} resolves to {address}, where the other nodes would look "
            "on themselves",
            f"Give nodes.{master}.host an address that they reach, or mend /etc/hosts on {node}.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_port(run: Run, node: str) -> Iterator[Problem]:
    master, via = run.cluster.master, run.cluster.launch.via
    if node != master.node or master.port == 0 or via == "manual":
        return
    try:
        socket.create_server(("", master.port)).close()
    except OSError as error:
        taken = "it is in use" if error.errno == errno.EADDRINUSE else _text(error)
        yield Problem(
            f"cannot listen on port {master.port}: {taken}",
            "Choose another master.port, or 0 for any free one.",
        )


def _check_interface(run: Run, node: str) -> Iterator[Problem]:
    name = run.cluster.nodes[node].interface
    known = sorted(name for _, name in socket.if_nameindex())
    if name is not None and name not in known:
        yield Problem(
            f"there is no network interface {name!r} (there are {', '.join(known)})",
            f"Mend nodes.{node}.interface.",
        )


def _check_directories(run: Run, node: str) -> Iterator[Problem]:
    directories = {"logs": run.directory(node), "cache_dir": run.cluster.nodes[node].cache_dir}
    for name, path in directories.items():
        if path is None:
            continue
        existing = path
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
            key = "log_dir" if name == "logs" else name
            yield Problem(
                f"cannot write to {existing!r}, and {name} would be {path!r}",
                f"Set nodes.{node}.{key}.",
            )
