"""Which node a process is on, and what is said when that cannot be known."""

from __future__ import annotations

import socket

import pytest

from mmrpc.config import parse_config, resolve_node
from mmrpc.errors import ConfigError

FAR = "203.0.113.7"  # an address of the documentation's range: of no machine


def cluster(via="local", **hosts):
    nodes = {name: {"host": host} for name, host in hosts.items()}
    return parse_config({"nodes": nodes, "launch": {"via": via}})


def test_what_is_said_wins():
    """``--node`` wins over ``MMRPC_NODE``, which wins over Slurm and the host."""
    two = cluster(a="127.0.0.1", b=FAR)
    environ = {"MMRPC_NODE": "b", "SLURMD_NODENAME": "a"}
    assert resolve_node(two, "a", environ) == "a"
    assert resolve_node(two, None, environ) == "b"
    assert resolve_node(two, None, {}) == "a"


def test_an_unknown_name_is_an_error():
    """A name that is not in the config is refused with those that are, whoever said it."""
    two = cluster(alpha="127.0.0.1", beta=FAR)
    with pytest.raises(ConfigError, match=r"known: alpha, beta\); did you mean 'alpha'") as caught:
        resolve_node(two, "alhpa", {})
    assert caught.value.key == "--node"
    with pytest.raises(ConfigError, match="known: alpha, beta") as caught:
        resolve_node(two, None, {"MMRPC_NODE": "gamma"})
    assert caught.value.key == "MMRPC_NODE"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURMD_NODENAME": "b"}, "b"),
        ({"SLURMD_NODENAME": "gpu07"}, "b"),
        ({"SLURMD_NODENAME": "gpu07", "SLURM_NODEID": "0"}, "b"),
        ({"SLURMD_NODENAME": "elsewhere", "SLURM_NODEID": "1"}, "b"),
    ],
)
def test_slurm_names_the_node(environ, expected):
    """Slurm's node name is looked for among names and hosts, then its number counts."""
    two = cluster("slurm", a="gpu06.cluster.example", b="gpu07.cluster.example")
    assert resolve_node(two, None, environ) == expected


def test_slurm_with_more_nodes_than_the_config():
    """A node of the allocation that the config does not have is told, not guessed."""
    with pytest.raises(ConfigError, match="number 2, and the config has 2 nodes"):
        resolve_node(cluster("slurm", a="x", b="y"), None, {"SLURM_NODEID": "2"})


def test_slurm_is_not_asked_for_other_jobs():
    """A local config inside an allocation is not the allocation's."""
    two = cluster("local", a=FAR, b="127.0.0.1")
    assert resolve_node(two, None, {"SLURM_NODEID": "0", "SLURMD_NODENAME": "gpu07"}) == "b"


def test_a_unique_host_is_found():
    """The node whose host is this machine's name or address is the one."""
    assert resolve_node(cluster(a=FAR, b=socket.gethostname()), None, {}) == "b"
    assert resolve_node(cluster(a=FAR, b="localhost"), None, {}) == "b"
    assert resolve_node(cluster(a=FAR, b="::1" if socket.has_ipv6 else "127.0.0.1"), None, {})


def test_an_ambiguous_host_is_an_error():
    """Two nodes on this host cannot be told apart by it."""
    with pytest.raises(ConfigError, match="could be any of the nodes a, b") as caught:
        resolve_node(cluster(a="127.0.0.1", b="127.0.0.1"), None, {})
    assert "--node" in str(caught.value)


def test_no_host_is_an_error():
    """If no node is on this host, the error names them all."""
    with pytest.raises(ConfigError, match=rf"none of the nodes a \({FAR}\)"):
        resolve_node(cluster(a=FAR), None, {})


def test_a_large_cluster_is_not_listed_whole():
    """An error of a thousand nodes stays readable."""
    large = cluster(**{f"n{i}": f"203.0.113.{i}" for i in range(200)})
    with pytest.raises(ConfigError, match=r"n11, \.\.\. \(200 in all\)") as caught:
        resolve_node(large, "m", {})
    assert len(str(caught.value)) < 200
