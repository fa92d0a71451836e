"""Command lines that start agents."""

from __future__ import annotations

import itertools
import shlex
import sys
from typing import Any

from mmrpc.config import ClusterConfig, parse_config
from mmrpc.launch import reach


def _cluster(via: str, node: dict[str, Any], **launch: Any) -> ClusterConfig:
    return parse_config(
        {
            "nodes": {"a": {"host": "10.0.0.1"}, "b": {"host": "10.0.0.2", **node}},
            "roles": {"w": {"target": "job:main", "workers": {"a": 1, "b": 1}}},
            "master": {"node": "a", "port": 1234},
            "launch": {"via": via, **launch},
        }
    )


def _options(command: list[str]) -> list[str]:
    return [value for flag, value in itertools.pairwise(command) if flag == "-o"]


def test_locally_it_is_the_agent_itself() -> None:
    """Under the node's interpreter, or else ours."""
    assert reach.command(_cluster("local", {}), "a")[0] == sys.executable
    assert reach.command(_cluster("local", {"python": "/p"}), "b") == [
        "/p",
        "-m",
        reach.AGENT_MODULE,
    ]


def test_ssh_gets_what_the_node_says() -> None:
    """The users's options come first, since ssh takes the first value of each."""
    ssh = {
        "host": "alias",
        "port": 2222,
        "user": "train",
        "config_file": "/c",
        "options": ["ProxyJump=gate"],
    }
    node = {"ssh": ssh, "python": "/opt/my python/bin/python"}
    cluster = _cluster("ssh", node, ssh_options=["ConnectTimeout=99"])
    command = reach.command(cluster, "b")
    assert command[:8] == ["ssh", "-T", "-F", "/c", "-p", "2222", "-l", "train"]
    assert _options(command)[:2] == ["ProxyJump=gate", "ConnectTimeout=99"]
    assert "BatchMode=yes" in _options(command)
    assert command[-3:-1] == ["--", "alias"]
    remote = shlex.split(command[-1])
    assert remote == ["/opt/my python/bin/python", "-m", reach.AGENT_MODULE]


def test_ssh_goes_to_the_nodes_host_if_nothing_else_is_said() -> None:
    """What is unset is left to ssh_config."""
    command = reach.command(_cluster("ssh", {}), "b")
    assert command[-2] == "10.0.0.2"
    assert not {"-p", "-l", "-F"} & set(command)


def test_srun_starts_one_task_on_slurms_node() -> None:
    """The user's options come last, where they win."""
    cluster = _cluster("slurm", {"python": "/p"}, srun_options=["--gres=gpu:1"])
    command = reach.command(cluster, "b", {"b": "node17"})
    assert command[0] == "srun"
    assert {"--nodelist=node17", "--ntasks=1", "--overlap"} <= set(command)
    assert command[-4:] == ["--gres=gpu:1", "/p", "-m", reach.AGENT_MODULE]


def test_by_hand_the_directory_is_entered_first() -> None:
    """What is printed can be pasted, whatever characters a path has."""
    text = reach.by_hand(_cluster("manual", {"cwd": "/srv/my job", "python": "/p"}), "b")
    assert text == "cd '/srv/my job' && /p -m mmrpc.cli agent CONFIG --node b"
