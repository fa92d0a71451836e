"""Where ranks meet: who says so, and what is said when they cannot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from mmrpc.config import parse_config
from mmrpc.errors import ConfigError, HandshakeError
from mmrpc.rpc.handshake import network
from mmrpc.rpc.rendezvous import (
    Endpoint,
    connect_store,
    find_endpoint,
    find_plain_endpoint,
    host_store,
)
from mmrpc.testing import free_port
from tests.needs import needs

VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    *("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in VARIABLES:
        # Set first, so that what a test sets is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def cluster(port=0):
    return parse_config({"nodes": {"a": {"host": "10.0.0.1"}}, "master": {"port": port}})


def test_call_launcher_config_in_this_order(monkeypatch):
    """What the call says wins over the launcher, which wins over the config."""
    assert find_endpoint(cluster(5), 2) == Endpoint("10.0.0.1", 5)
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "6")
    assert find_endpoint(cluster(5), 2) == Endpoint("host", 6)
    assert find_endpoint(cluster(5), 2, "tcp://there:7?x=1") == Endpoint("there", 7)
    assert find_endpoint(cluster(5), 2, "tcp://[fe80::1]:7") == Endpoint("fe80::1", 7)
    assert find_endpoint(cluster(5), 2, "env://") == Endpoint("host", 6)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert find_endpoint(cluster(5), 2).is_agents


def test_any_port_needs_somebody_who_tells_it():
    """Port 0 without a launcher is fine for one rank and a ConfigError for several."""
    assert find_endpoint(cluster(), 1).port == 0
    with pytest.raises(ConfigError, match="no launcher has told") as caught:
        find_endpoint(cluster(), 2)
    assert caught.value.key == "master.port"


def test_addresses_of_both_kinds_are_written():
    """An IPv6 address stands in brackets."""
    assert Endpoint("h", 1).init_method == "tcp://h:1"
    assert Endpoint("fe80::1", 1).init_method == "tcp://[fe80::1]:1"


def test_a_port_in_use_is_told():
    """A port that another program has is named."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(HandshakeError, match=f"port {port}: another program does"):
            host_store(Endpoint("127.0.0.1", port), 5, "a")


def test_an_absent_master_is_told():
    """Who finds nobody at the master's address says which address, for how long, and as whom."""
    port = free_port()
    with pytest.raises(HandshakeError, match="rank 3 cannot reach rank 0 at") as caught:
        connect_store(Endpoint("127.0.0.1", port), 0.3, 3, "b")
    assert "connection refused for 0.3 s" in str(caught.value)
    assert (caught.value.rank, caught.value.node) == (0, "b")


def test_a_store_is_found():
    """A client finds the store on the port that was free."""
    server = host_store(Endpoint("127.0.0.1", 0), 30, "a")
    client = connect_store(Endpoint("127.0.0.1", server.port), 30, 1, "a")
    server.set("k", "v")
    assert client.get("k") == b"v"


def test_an_interface_sets_both_variables(monkeypatch):
    """One field serves TensorPipe and Gloo."""
    network.use_interface("lo", "10.0.0.1")
    assert os.environ["TP_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert network.advertised_address() == "127.0.0.1"


def test_loopback_chooses_no_interface():
    """A node whose host is loopback, or unknown, leaves the choice to torch."""
    network.use_interface(None, "127.0.0.1")
    network.use_interface(None, "no-such-host.invalid")
    assert "TP_SOCKET_IFNAME" not in os.environ


def test_the_environment_wins_over_a_guess(monkeypatch):
    """An interface that the environment names is not replaced by one that was found."""
    monkeypatch.setenv("TP_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr(network, "_interface_of", lambda host: "eth0")
    network.use_interface(None, "10.0.0.1")
    assert os.environ["TP_SOCKET_IFNAME"] == "eth7"


def test_an_unknown_interface_has_no_address():
    """An interface that is not there has no address."""
    assert network.address_of("none0") is None
    assert network.address_of("lo") == "127.0.0.1"


@needs("namespaces")
def test_the_interface_of_the_nodes_host_is_found():
    """In a network where the host has the address of the config, its interface is the one."""
    code = (
        "import os; from mmrpc.rpc.handshake import network;"
        "network.use_interface(None, '10.9.8.7');"
        "print(os.environ['TP_SOCKET_IFNAME'], os.environ['GLOO_SOCKET_IFNAME'],"
        "network.advertised_address(), network.network_id())"
    )
    steps = (
        "ip link add inner type veth peer name outer && ip addr add 10.9.8.7/24 dev inner"
        ' && ip link set inner up && exec "$@"'
    )
    command = ["unshare", "--net", "sh", "-c", steps, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    *found, network_id = done.stdout.split()
    assert found == ["inner", "inner", "10.9.8.7"]
    assert network_id != network.network_id()


def test_a_group_without_a_config_meets_where_torch_would(monkeypatch):
    """By URL or by the environment; what is no TCP store is torch's own business."""
    assert find_plain_endpoint("tcp://there:7?use_libuv=0") == Endpoint("there", 7)
    assert find_plain_endpoint("tcp://there") is None
    assert find_plain_endpoint("file:///tmp/x") is None
    monkeypatch.setenv("MASTER_ADDR", "host")
    with pytest.raises(ConfigError, match="MASTER_PORT is not set"):
        find_plain_endpoint("env://")
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(ConfigError, match="'http' is not a port"):
        find_plain_endpoint("env://")
    monkeypatch.setenv("MASTER_PORT", "6")
    assert find_plain_endpoint("env://") == Endpoint("host", 6)


def test_a_master_that_is_not_this_host_is_told():
    """Who hosts the store and then does not reach it has the address of another."""
    # Nothing of this host answers at an address for documentation.
    with pytest.raises(HandshakeError, match=r"does not reach its store at 192\.0\.2\.1:"):
        host_store(Endpoint("192.0.2.1", free_port()), 1, "a")
