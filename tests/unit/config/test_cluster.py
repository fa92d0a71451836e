"""The model of a cluster: what must fit together, and the workers that follow."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from pydantic import ValidationError

from mmrpc.config import ClusterConfig, MasterConfig, NodeConfig, config_hash, parse_config
from mmrpc.errors import ConfigError


def tree(**changes):
    """A valid cluster of two nodes, with some parts replaced."""
    return {
        "nodes": {
            "a": {"host": "10.0.0.1", "mounts": {"data": "/mnt/data"}},
            "b": {"host": "10.0.0.2", "mounts": {"data": "/srv/data"}},
        },
        "mounts": {"data": {}},
        "roles": {
            "ps": {"target": "m:serve", "workers": {"a": 1}},
            "trainer": {"target": "m:train", "workers": {"a": 1, "b": 2}},
        },
        **changes,
    }


def test_ranks_and_names_follow_from_the_file():
    """Names, ranks and local ranks are those of the roles and nodes in the order of the file."""
    workers = parse_config(tree()).workers()
    assert [(w.name, w.node, w.rank, w.local_rank) for w in workers] == [
        ("ps0", "a", 0, 0),
        ("trainer0", "a", 1, 1),
        ("trainer1", "b", 2, 0),
        ("trainer2", "b", 3, 1),
    ]
    assert [w.role_rank for w in workers] == [0, 0, 1, 2]


def test_rank_0_is_on_the_master():
    """The first worker on the master's node is rank 0, wherever its role stands in the file."""
    cluster = parse_config(tree(master={"node": "b"}))
    assert [(w.name, w.rank) for w in cluster.workers()] == [
        ("trainer1", 0),
        ("ps0", 1),
        ("trainer0", 2),
        ("trainer2", 3),
    ]
    assert [w.name for w in cluster.workers_on("b")] == ["trainer1", "trainer2"]


def test_a_cluster_may_have_no_roles():
    """Without roles there are no workers, and every node must know every mount."""
    assert parse_config(tree(roles={})).workers() == ()
    with pytest.raises(ConfigError, match="does not say where mount 'data' is"):
        parse_config({"nodes": {"a": {}}, "mounts": {"data": {}}})


def test_master_is_the_first_node_unless_said():
    """The master's node has a default, and a port alone may be given."""
    assert parse_config(tree()).master == MasterConfig(node="a", port=0)
    assert parse_config(tree(master={"port": 29400})).master == MasterConfig(node="a", port=29400)


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"master": {"node": "aa"}}, "master.node", r"known: a, b\); did you mean 'a'"),
        ({"master": {"port": 70000}}, "master.port", "less than or equal to 65535"),
        ({"master": {"port": 9, "process_group_port": 9}}, "master", "cannot meet at one port"),
        ({"launch": {"via": "manual"}}, "master.port", "needs all nodes on one host"),
        ({"rpc": {"threads": 1}}, "rpc.threads", "nested call waits"),
        ({"rpc": {"verify": "hash"}}, "rpc.verify", "'none', 'stat' or 'digest'"),
        ({"rpc": {"mount_timeout_s": 60}}, "rpc.mount_timeout_s", "does not fit"),
        ({"rpc": {"timeout_s": "inf"}}, "rpc.timeout_s", "finite"),
        ({"mounts": {}}, "nodes.a.mounts.data", "there is no mount 'data'"),
        ({"mounts": {"data": {}, "p": {}}}, "nodes.a.mounts", "does not say where mount 'p' is"),
        ({"mounts": {"da.ta": {}}}, "mounts.da.ta", "a name holds"),
        ({"mounts": {"data": {"access": "write", "immutable": True}}}, "mounts.data", "immutable"),
        ({"roles": {}, "name": "a b"}, "name", "a name holds"),
        ({"roles": {"r": {"target": "m:f", "workers": {"a": -1}}}}, "roles.r.workers", "negative"),
        ({"roles": {"r": {"target": "m:f", "workers": {"c": 1}}}}, "roles.r.workers.c", "'c'"),
        ({"roles": {"r": {"target": "m:f", "workers": {}}}}, "roles.r.workers", "no worker on any"),
        ({"roles": {"r": {"target": "m:f", "workers": {"a": True}, "args": [True]}}}, None, "str"),
        ({"roles": {"r": {"target": "m:f", "workers": {"a": 10**9}}}}, "roles.r.workers", "4,096"),
        ({"logs": {"tee": ["ps1"]}}, "logs.tee.0", "did you mean 'ps0'"),
        ({"logs": {"dir": "a\0b"}}, "logs.dir", "NUL"),
        ({"roles": {"r": {"target": "tr\0ue", "workers": {"a": 1}}}}, "roles.r.target", "NUL"),
        ({"launch": {"ssh_options": ["\ud800"]}}, "launch.ssh_options.0", "surrogate"),
        ({"nodes": {"a": {"env": {"A": "\0"}}}}, "nodes.a.env.A", "NUL"),
        ({"nodes": {"a": {"env": {"A=": "1"}}}}, "nodes.a.env.A=", "not the name of a variable"),
        ({"nodes": {}}, "nodes", "this is empty"),
        ({"nodes": {"a b": {}}}, "nodes.a b", "a name holds"),
        ({"master": {"port": True}}, "master.port", "a number"),
        ({"launch": {"grace_s": False}}, "launch.grace_s", "a number"),
        ({"launch": {"start_timeout_s": 1e300}}, "launch.start_timeout_s", "1000000"),
    ],
)
def test_what_does_not_fit_is_named(changes, key, words):
    """Each mistake is a ConfigError that names the key and says what would be right."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse_config(tree(**changes))
    if key is not None:
        assert caught.value.key == key


def test_all_problems_are_told_at_once():
    """One error holds every problem, so that a file can be mended in one go."""
    broken = tree(master={"node": "x"}, logs={"tee": ["nobody"]})
    broken["roles"]["ps"]["workers"] = {"a": 1, "c": 1}
    with pytest.raises(ConfigError) as caught:
        parse_config(broken)
    for words in ("no node 'x'", "no node 'c'", "no worker 'nobody'"):
        assert words in str(caught.value)


def test_names_of_workers_are_unique():
    """Two roles cannot both have a worker of one name."""
    roles = {
        "ps": {"target": "m:f", "workers": {"a": 11}},
        "ps1": {"target": "m:f", "workers": {"a": 1}},
    }
    with pytest.raises(ConfigError, match="both have a worker ps10"):
        parse_config(tree(roles=roles))


def test_rank_0_needs_the_master_unless_an_agent_is_there():
    """Without a launcher, rank 0 hosts the rendezvous and must be on the master's node."""
    roles = {"r": {"target": "m:f", "workers": {"b": 1}}}
    master = {"port": 29400}
    parse_config(tree(roles=roles, master=master))
    with pytest.raises(ConfigError, match="no worker runs on 'a', and rank 0 must"):
        parse_config(tree(roles=roles, master=master, launch={"via": "manual"}))


def test_an_idle_node_needs_no_mounts():
    """A node without workers may leave mounts out."""
    nodes = {**tree()["nodes"], "spare": {}}
    assert "spare" in parse_config(tree(nodes=nodes)).nodes


def test_one_host_may_choose_its_port_by_hand():
    """Port 0 is fine without a launcher when all nodes are on one host."""
    cluster = parse_config({"nodes": {"a": {}, "b": {}}, "launch": {"via": "manual"}})
    assert cluster.is_one_host()
    assert cluster.master.port == 0


def test_a_config_is_frozen():
    """Neither a field nor an entry of a table can be changed."""
    cluster = parse_config(tree())
    with pytest.raises(ValidationError, match="frozen"):
        cluster.name = "other"
    with pytest.raises(TypeError, match="cannot be changed"):
        cluster.nodes["c"] = NodeConfig()


def test_a_config_survives_pickling_and_json():
    """A copy that travelled is equal, and hashes the same."""
    cluster = parse_config(tree())
    for other in (
        pickle.loads(pickle.dumps(cluster)),
        ClusterConfig.model_validate_json(cluster.model_dump_json()),
        cluster.model_copy(),
    ):
        assert other == cluster
        assert config_hash(other) == config_hash(cluster)


def test_the_hash_is_of_the_meaning():
    """Spelling and order of keys do not count; values, defaults and ranks do."""
    base = config_hash(parse_config(tree()))
    nodes = tree()["nodes"]
    assert base == config_hash(parse_config(tree(nodes=nodes, rpc={"threads": 8})))
    respelt = {**nodes, "a": {"mounts": {"data": "/mnt//data/"}, "host": "10.0.0.1"}}
    assert base == config_hash(parse_config(tree(nodes=respelt)))
    assert base != config_hash(parse_config(tree(rpc={"threads": 9})))
    roles = dict(reversed(tree()["roles"].items()))
    assert base != config_hash(parse_config(tree(roles=roles)))


def test_the_hash_is_the_same_in_another_process():
    """The hash does not depend on the process, so that nodes can compare it."""
    code = (
        "from mmrpc.config import config_hash, parse_config;"
        "print(config_hash(parse_config({'nodes': {'a': {'env': {'X': '1', 'Y': '2'}}}})))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    env = {"Y": "2", "X": "1"}
    assert printed == {config_hash(parse_config({"nodes": {"a": {"env": env}}}))}


def test_secrets_do_not_show():
    """Neither the repr nor an error shows the value of a variable whose name says secret."""
    nodes = {"a": {"env": {"AWS_SECRET_ACCESS_KEY": "hunter2", "PLAIN": "shown"}}}
    cluster = parse_config({"nodes": nodes})
    assert "hunter2" not in repr(cluster)
    assert "shown" in repr(cluster)
    assert cluster.nodes["a"].env["AWS_SECRET_ACCESS_KEY"] == "hunter2"
    nodes["a"]["env"]["API_TOKEN"] = ["hunter2"]
    with pytest.raises(ConfigError, match="API_TOKEN") as caught:
        parse_config({"nodes": nodes})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValidationError) as raw:
        ClusterConfig.model_validate({"nodes": nodes})
    assert "hunter2" not in str(raw.value)


def test_numbers_in_env_and_args_are_text():
    """Numbers are passed on as they are written; a boolean has no one spelling and is refused."""
    role = {"target": "m:f", "workers": {"a": 1}, "args": ["--lr", 0.1], "env": {"N": 4}}
    config = parse_config({"nodes": {"a": {}}, "roles": {"r": role}}).roles["r"]
    assert config.args == ("--lr", "0.1")
    assert config.env == {"N": "4"}
    with pytest.raises(ConfigError, match="string"):
        parse_config({"nodes": {"a": {"env": {"X": True}}}})
