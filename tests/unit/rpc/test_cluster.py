"""What a group on a cluster takes from the config, and what it says of it."""

from __future__ import annotations

import pytest

from mmrpc import rpc
from mmrpc.config import parse_config
from mmrpc.errors import ConfigError
from mmrpc.rpc import cluster as group
from mmrpc.rpc import torchrpc


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "MMRPC_NODE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    yield
    group.forget()


def config(tmp_path, **rpc_config):
    return parse_config(
        {
            "nodes": {"a": {"mounts": {"data": str(tmp_path)}}},
            "mounts": {"data": {"access": "write"}},
            "rpc": rpc_config,
        }
    )


def test_options_come_from_the_config(tmp_path):
    """Threads, timeout and rendezvous are the config's if the caller gives none."""
    resolver, options = group.prepare(
        config(tmp_path, threads=5, timeout_s=7), None, "w", 0, 1, None
    )
    assert (options.num_worker_threads, options.rpc_timeout) == (5, 7.0)
    assert options.init_method.startswith("tcp://127.0.0.1:")
    assert resolver.node == "a"


def test_options_of_the_caller_win(tmp_path):
    """What the caller chose stays, but for the rendezvous that it left open."""
    given = rpc.TensorPipeRpcBackendOptions(num_worker_threads=3, rpc_timeout=2)
    _, options = group.prepare(config(tmp_path), None, "w", 0, 1, given)
    assert options is given
    assert (options.num_worker_threads, options.rpc_timeout) == (3, 2.0)
    assert options.init_method.startswith("tcp://127.0.0.1:")


def test_torch_may_choose_the_transport(tmp_path):
    """Null leaves transports and channels to torch."""
    _, options = group.prepare(
        config(tmp_path, transports=None, channels=None), None, "w", 0, 1, None
    )
    assert type(options) is torchrpc.rpc.TensorPipeRpcBackendOptions


def test_a_group_without_a_size_is_refused(tmp_path):
    """Workers that may join and leave cannot prove anything together."""
    with pytest.raises(ConfigError, match="a fixed number of workers"):
        group.prepare(config(tmp_path), None, "w", 0, None, None)


def test_a_report_needs_a_cluster():
    """Without a cluster there is nothing to report, and the error says what to do."""
    with pytest.raises(ConfigError, match=r"Pass init_rpc\(cluster=\.\.\.\)"):
        rpc.path_report()


def test_the_report_is_the_matrix(tmp_path):
    """After the handshake, the matrix tells each mount on each node, as a model."""
    group.prepare(config(tmp_path), "a", "w", 0, 1, None)
    report = rpc.path_report()
    found = report.get("data", "a")
    assert (found.path, found.readable, found.writable) == (str(tmp_path), True, True)
    with pytest.raises(KeyError):
        report.get("data", "b")
    assert type(report).model_validate_json(report.model_dump_json()) == report
