"""What each worker of a run is given."""

from __future__ import annotations

from typing import Any

from mmrpc.config import parse_config
from mmrpc.launch.describe import describe
from mmrpc.launch.plan import Run, attempt_env, plan_node, table


def _run(via: str = "local", **more: Any) -> Run:
    config = {
        "name": "demo",
        "nodes": {
            "a": {"host": "10.0.0.1", "env": {"X": "node", "Y": "node"}, "interface": "eth0"},
            "b": {"host": "10.0.0.2", "cwd": "/srv/job", "log_dir": "/logs", "python": "py3"},
            "idle": {"host": "10.0.0.3"},
        },
        "master": {"node": "b", "port": 1234},
        "roles": {
            "ps": {"target": "train:serve", "workers": {"a": 1}, "env": {"X": "role"}},
            "trainer": {"target": "train.py", "args": ["--lr", 1], "workers": {"a": 1, "b": 2}},
        },
        "launch": {"via": via},
        "logs": {"tee": ["ps0"]},
        **more,
    }
    return Run(parse_config(config), "id", "demo-1", ("--fast",), "/srv/me")


def test_nodes_begin_with_the_masters_and_leave_out_the_idle() -> None:
    """The master's agent hosts the store; a node without work needs no agent."""
    assert _run().nodes() == ["b", "a"]
    assert _run(master={"node": "idle", "port": 1}).nodes() == ["idle", "a", "b"]


def test_a_workers_environment_says_who_it_is() -> None:
    """Its role's variables win over its node's, and nothing that names it can be overridden."""
    run = _run()
    ps, trainer = plan_node(run, "a", "python")
    assert (ps.env["X"], trainer.env["X"], ps.env["Y"]) == ("role", "node", "node")
    assert ps.env["TP_SOCKET_IFNAME"] == ps.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert (trainer.env["RANK"], trainer.env["LOCAL_RANK"]) == ("2", "1")
    assert (trainer.env["WORLD_SIZE"], trainer.env["LOCAL_WORLD_SIZE"]) == ("4", "2")
    assert trainer.env["MMRPC_WORKER"] == "trainer0"
    assert (ps.shown, trainer.shown) == (True, False)


def test_the_command_line_has_the_roles_arguments_and_the_launchs() -> None:
    """In that order."""
    (first, _) = plan_node(_run(), "b", "python")
    assert first.argv == ("python", "train.py", "--lr", "1", "--fast")


def test_directories_follow_the_node_where_machines_differ() -> None:
    """A relative log directory is the launcher's on its machine and the node's on others."""
    local, remote = _run(), _run("ssh")
    assert local.directory() == remote.directory() == "/srv/me/runs/demo-1"
    assert local.directory("a") == "/srv/me/runs/demo-1"
    assert local.directory("b") == remote.directory("b") == "/logs/demo-1"
    no_log_dir = _run("ssh", nodes={"a": {}, "b": {"cwd": "/srv/job"}})
    assert no_log_dir.directory("b") == "/srv/job/runs/demo-1"
    assert no_log_dir.cwd_on("a") == "/srv/me"


def test_what_is_known_at_the_start_only() -> None:
    """The store's port and the count of restarts, for us and for torch."""
    assert attempt_env(2, "10.0.0.1", 5) == {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5",
        "MMRPC_RESTARTS": "2",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }


def test_the_table_lists_ranks_in_order() -> None:
    """One line per worker under a heading."""
    run = _run()
    lines = table(run.cluster.workers(), run.cluster).splitlines()
    assert lines[0].split() == ["RANK", "WORKER", "NODE", "TARGET"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "2", "3"]


def test_a_description_tells_all_and_no_secret() -> None:
    """Secrets are hidden by name; a free port is said to be chosen later."""
    nodes = {"a": {"env": {"DB_PASSWORD": "hush", "SIZE": "3"}}, "b": {}}
    text = describe(_run(nodes=nodes, master={"node": "a", "port": 0}))
    assert "hush" not in text
    assert "SIZE=3" in text
    assert "MASTER_PORT=<chosen when the run starts>" in text
    assert "worker trainer2:" in text


def test_a_description_of_nodes_to_be_started_by_hand_says_what_to_type() -> None:
    """The master's agent is the launcher's own child; the others have a command."""
    roles = {"w": {"target": "train:main", "workers": {"a": 1, "b": 1}}}
    text = describe(_run("manual", roles=roles, logs={}))
    assert "agent: python -m mmrpc.cli agent CONFIG --node a" in text
    assert "agent: py3 -m mmrpc.launch.agent" in text
