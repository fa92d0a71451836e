"""A launch over ssh on two nodes that share no network stack and have addresses of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import (
    PYTHON,
    assert_nobody_left,
    launching,
)
from tests.distributed.sshd import Sshd, serving
from tests.needs import needs

pytestmark = needs("namespaces", "sshd")

RPC_JOB = """
import os, sys
import torch
import mmrpc.rpc as rpc
from mmrpc import MemoryMappedTensor

def total(x):
    return x.sum().item(), os.environ["MMRPC_NODE"]

def main():
    rpc.init_rpc()
    if os.environ["RANK"] == "0":
        x = MemoryMappedTensor.from_tensor(torch.arange(5), filename=sys.argv[1] + "/x")
        for worker in ("w1", "w2"):
            print("total", worker, *rpc.rpc_sync(worker, total, (x,)))
    rpc.shutdown()
"""


@dataclass(frozen=True)
class Node:
    """A network namespace with an address on a bridge of this machine, and a server in it."""

    name: str
    address: str
    server: Sshd


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Node]]:
    """Two namespaces, a and b, with an sshd in each."""
    base, tag = tmp_path_factory.mktemp("namespaces"), str(os.getpid())
    network = f"10.213.{os.getpid() % 250}"
    bridge = f"mm{tag}"
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{network}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        found = {}
        for number, name in enumerate("ab", start=2):
            namespace, outer = f"mm{name}{tag}", f"mm{name}{tag}"
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "del", namespace)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "net0", "netns", namespace)
            _ip("link", "set", outer, "master", bridge, "up")
            address = f"{network}.{number}"
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "net0")
            for device in ("lo", "net0"):
                _ip("-n", namespace, "link", "set", device, "up")
            prefix = ("ip", "netns", "exec", namespace)
            server = stack.enter_context(serving(base / name, prefix, address))
            found[name] = Node(namespace, address, server)
        yield found


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@pytest.fixture
def config(nodes: dict[str, Node], tmp_path: Path) -> dict[str, Any]:
    """One worker on a, two on b, and a mount that both write to."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "net_job.py").write_text(RPC_JOB)
    described = {
        name: node.server.node(
            host=node.address,
            interface="net0",
            python=PYTHON,
            cwd=str(tmp_path),
            mounts={"shared": str(tmp_path / "shared")},
        )
        for name, node in nodes.items()
    }
    return {
        "name": "test",
        "mounts": {"shared": {"access": "write"}},
        "nodes": described,
        "roles": {
            "w": {
                "target": "net_job:main",
                "args": [str(tmp_path / "shared")],
                "workers": {"a": 1, "b": 2},
            }
        },
        "launch": {"via": "ssh", "grace_s": 5},
    }


def test_a_reference_crosses_the_network(tmp_path: Path, config: dict[str, Any]) -> None:
    """Nodes meet at the master's address, prove the mount, and send a tensor by reference."""
    with launching(tmp_path, config) as launch:
        assert launch.code() == 0, launch.text
        assert {"w0 | total w1 10 b", "w0 | total w2 10 b"} <= set(launch.lines)
        proven = [line.split() for line in launch.lines if "| mmrpc: shared" in line]
        assert [(row[4], row[9]) for row in proven] == [("a", "nonce"), ("b", "nonce")]
    assert_nobody_left(tmp_path)


def test_an_interface_that_is_not_there_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    """Before any worker tries to use it."""
    config["nodes"]["b"]["interface"] = "eth7"
    with launching(tmp_path, config) as launch:
        assert launch.code() == 1
        assert "on b: there is no network interface 'eth7'" in launch.text
    assert_nobody_left(tmp_path)


def test_a_master_that_the_others_cannot_reach_is_named(
    tmp_path: Path, config: dict[str, Any], nodes: dict[str, Node]
) -> None:
    """A management address that peers cannot use is told by the node that tried."""
    config["nodes"]["a"]["ssh"]["host"] = nodes["a"].address
    # It is a's own, on its loopback device: ssh would not get there, and neither does b.
    config["nodes"]["a"]["host"] = "10.214.0.1"
    config["launch"]["start_timeout_s"] = 20
    with launching(tmp_path, config) as launch:
        assert launch.code() == 1
        assert "cannot reach the master at 10.214.0.1" in launch.text
    assert_nobody_left(tmp_path)


def test_a_cut_network_ends_both_sides(
    tmp_path: Path, config: dict[str, Any], nodes: dict[str, Node]
) -> None:
    """Nothing is closed when a cable is pulled: each side finds out for itself."""
    config["roles"]["w"]["target"] = "job:hold"
    with launching(tmp_path, config) as launch:
        launch.until("up w0", "up w1", "up w2")
        namespace = nodes["b"].name
        # A quarter of an hour by default.
        retries = "echo 3 > /proc/sys/net/ipv4/tcp_retries2"
        subprocess.run(["ip", "netns", "exec", namespace, "sh", "-c", retries], check=True)
        _ip("link", "set", namespace, "down")
        try:
            assert launch.code() == 255
            assert "on b: the ssh connection was lost" in launch.text
            assert_nobody_left(tmp_path, patience_s=60)
        finally:
            _ip("link", "set", namespace, "up")
