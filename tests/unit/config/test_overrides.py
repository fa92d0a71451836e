"""``--set``: it wins over the file, and its mistakes are told as its own."""

from __future__ import annotations

import pytest

from mmrpc.config import parse_config
from mmrpc.config.origin import Place
from mmrpc.config.overrides import apply_sets
from mmrpc.errors import ConfigError

TREE = {
    "nodes": {"a": {"host": "h"}},
    "roles": {"r": {"target": "m:f", "workers": {"a": 1}, "args": ["x", "y"]}},
}


@pytest.mark.parametrize(
    ("setting", "read", "value"),
    [
        ("rpc.threads=3", lambda c: c.rpc.threads, 3),
        ("rpc.timeout_s=1.5", lambda c: c.rpc.timeout_s, 1.5),
        ("name=other", lambda c: c.name, "other"),
        ("name='7'", lambda c: c.name, "7"),
        ("roles.r.workers={a: 4}", lambda c: c.roles["r"].workers, {"a": 4}),
        ("logs.tee=[r0]", lambda c: c.logs.tee, ("r0",)),
        ("roles.r.args.1=z=w", lambda c: c.roles["r"].args, ("x", "z=w")),
        ("nodes.a.env.X=", lambda c: c.nodes["a"].env, {"X": ""}),
        ("nodes.a.python=null", lambda c: c.nodes["a"].python, None),
        (" rpc.threads = 5", lambda c: c.rpc.threads, 5),
    ],
)
def test_values_are_yaml(setting, read, value):
    """Scalars, lists and mappings are read as in the file; parts that are missing are made."""
    assert read(parse_config(TREE, [setting])) == value


def test_the_last_one_wins():
    """Settings apply in order."""
    assert parse_config(TREE, ["rpc.threads=3", "rpc.threads=4"]).rpc.threads == 4


@pytest.mark.parametrize(
    ("setting", "key", "words"),
    [
        ("rpc.threads", None, "not of the form key=value"),
        ("rpc..threads=3", None, "not of the form key=value"),
        ("=3", None, "not of the form key=value"),
        ("rpc.thread=3", "rpc.thread", "did you mean 'threads'"),
        ("rpc.threads=1", "rpc.threads", "at least 2"),
        ("rpc.threads=[", "rpc.threads", "while parsing"),
        ("nodes.a.host.x=1", "nodes.a.host", "without keys"),
        ("roles.r.args.2=z", "roles.r.args", "it has 2 items"),
        ("roles.r.args.last=z", "roles.r.args", "it has 2 items"),
    ],
)
def test_mistakes_are_told_as_its_own(setting, key, words):
    """An error says that it is about ``--set``, and which key."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse_config(TREE, [setting])
    assert caught.value.file == "--set"
    assert caught.value.key == key


def test_places_of_what_was_replaced_are_forgotten():
    """What a setting replaced no longer points into the file."""
    tree = {"a": {"b": 1, "c": 2}}
    places = {(): Place("f"), ("a",): Place("f", 1), ("a", "b"): Place("f", 2)}
    apply_sets(tree, places, ["a={d: 3}"])
    assert tree == {"a": {"d": 3}}
    assert places == {(): Place("f"), ("a",): Place("--set"), ("a", "d"): Place("--set")}
