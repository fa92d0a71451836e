"""Files: three formats, and errors that name file, line and column."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrpc.config import config_hash, dump_config, load_config, parse_config
from mmrpc.config.sources import parse_text
from mmrpc.errors import ConfigError

YAML = """\
# a comment
name: job
nodes:
  a:
    host: 10.0.0.1
    mounts: {data: /mnt/data}
mounts: {data: {access: read}}
rpc: {threads: 4}
"""
JSON = """\
{
\t"name": "job",
\t"nodes": {
\t\t"a": {"host": "10.0.0.1", "mounts": {"data": "/mnt/data"}}
\t},
\t"mounts": {"data": {"access": "read"}},
\t"rpc": {"threads": 4}
}
"""
TOML = """\
name = "job"

[nodes.a]
host = "10.0.0.1"
mounts = {data = "/mnt/data"}

[mounts.data]
access = "read"

[rpc]
threads = 4
"""


@pytest.fixture
def load(tmp_path):
    def load(text, suffix=".yaml", set=()):
        path = tmp_path / f"c{suffix}"
        path.write_text(text)
        return load_config(path, set)

    return load


def test_three_formats_mean_the_same(load):
    """YAML, JSON and TOML give equal configs."""
    assert load(YAML) == load(JSON, ".json") == load(TOML, ".toml")


@pytest.mark.parametrize(
    ("suffix", "text", "line", "column", "key", "words"),
    [
        (".yaml", YAML.replace("host", "hots"), 5, 5, "nodes.a.hots", "did you mean 'host'"),
        (".yaml", YAML.replace("/mnt", "mnt"), 6, 14, "nodes.a.mounts.data", "is relative"),
        (".yaml", YAML.replace("4", "four"), 8, 7, "rpc.threads", "whole number"),
        (".yaml", YAML + "name: again\n", 9, 1, None, "'name' is given twice"),
        (".yaml", YAML + "logs: [\n", 10, 1, None, "while parsing"),
        (".yaml", YAML + "1: 2\n", 9, 1, None, "not text"),
        (".yaml", YAML + "logs: !x {}\n", 9, 1, "logs", "the tag '!x'"),
        (".yaml", YAML + "logs: {dir: 2020-01-01}\n", 9, 8, "logs.dir", "Put it in quotes"),
        (".json", JSON.replace("threads", "thread"), 7, 10, "rpc.thread", "did you mean 'threads'"),
        (".json", JSON.replace("}\n}", "},\n}"), 8, 1, None, "expecting property name"),
        (".json", JSON.replace('"rpc"', '"name"'), 7, 2, None, "'name' is given twice"),
        (".toml", TOML.replace("threads", "thread"), 11, 1, "rpc.thread", "did you mean 'threads'"),
        (".toml", TOML.replace("/mnt", "mnt"), 5, 1, "nodes.a.mounts.data", "is relative"),
        (".toml", TOML.replace("= 4", "=="), 11, 10, None, "invalid value"),
        (".toml", TOML + "threads = 5\n", 12, 12, None, "cannot overwrite"),
    ],
)
def test_errors_name_the_place(load, suffix, text, line, column, key, words):
    """Each error names file, line, column and key, and says what would be right."""
    with pytest.raises(ConfigError, match=words) as caught:
        load(text, suffix)
    error = caught.value
    assert (error.line, error.column, error.key) == (line, column, key)
    assert error.file.endswith(f"c{suffix}")
    assert str(error).startswith(f"{error.file}:{line}:{column}: ")


def test_the_first_problem_of_the_file_comes_first(load):
    """Problems are told in the order of the file, each with its place."""
    text = YAML.replace("host", "hots").replace("threads: 4", "thread: 4")
    with pytest.raises(ConfigError) as caught:
        load(text)
    first, second = str(caught.value).split("\n")
    assert ":5:5: nodes.a.hots: unknown key" in first
    assert ":8:7: rpc.thread: unknown key" in second


def test_checks_across_parts_name_the_place(load):
    """A problem between two parts of the file is placed where it can be mended."""
    with pytest.raises(ConfigError, match="there is no node 'b'") as caught:
        load(YAML + "roles:\n  r:\n    target: m:f\n    workers: {a: 1, b: 1}\n")
    assert (caught.value.line, caught.value.column) == (12, 21)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n", "text"])
def test_a_file_that_is_no_mapping_is_refused(load, text):
    """An empty file, a list and a text are no config."""
    with pytest.raises(ConfigError, match="the file is"):
        load(text)


def test_unreadable_files_are_config_errors(tmp_path):
    """A missing file, a directory, another kind of file and bytes that are no text are told."""
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "missing.yaml")
    (tmp_path / "dir.yaml").mkdir()
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path / "dir.yaml")
    with pytest.raises(ConfigError, match=r"Name it \.yaml"):
        load_config(tmp_path / "config.ini")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 6"):
        load_config(tmp_path / "latin.yaml")


_BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("suffix", "text", "words"),
    [
        (".yaml", _BOMB, "more than 200,000 values"),
        (".yaml", "a: " + "[" * 2000 + "]" * 2000, "nested too deeply"),
        (".json", '{"a": ' + "[" * 900 + "]" * 900 + "}", "nested too deeply"),
        (".json", '{"a": ' + "[" * 20000 + "]" * 20000 + "}", "nested too deeply"),
        (".toml", "a = " + "[" * 2000 + "]" * 2000, "nested too deeply"),
        (".yaml", "rpc: {threads: " + "9" * 5000 + "}", "cannot be read"),
        (".json", '{"rpc": {"threads": ' + "9" * 5000 + "}}", "cannot be read"),
        (".yaml", "name: 2020-13-45", "cannot be read: month"),
        (".yaml", "name: a\n# \0", r"c.yaml:2: the character U\+0000 is not allowed"),
        (".yaml", "#" * (5 << 20), "more than 4,194,304 characters"),
    ],
)
def test_what_would_break_a_reader_is_a_config_error(load, suffix, text, words):
    """Neither depth nor size nor a strange value gets through as an error of another library."""
    with pytest.raises(ConfigError, match=words):
        load(text, suffix)


def test_missing_nodes_are_told_alone(load):
    """What follows from the nodes, such as the master, is not told as a mistake of its own."""
    with pytest.raises(ConfigError) as caught:
        load("name: job\n")
    assert caught.value.reason == "this is required"
    assert caught.value.key == "nodes"


def test_yaml_keeps_what_is_written(load):
    """``no`` and ``1:30`` are text, as YAML 1.2 has it, not False and 90."""
    env = load("nodes: {a: {env: {X: no, Y: 1:30, Z: 0x10}}}").nodes["a"].env
    assert (env["X"], env["Y"]) == ("no", "1:30")


def test_yaml_anchors_are_used(load):
    """Anchors and merge keys work, and what was merged has a place nonetheless."""
    cluster = load("nodes:\n  a: &n {host: h, cwd: /x}\n  b:\n    <<: *n\n    host: g\n")
    assert (cluster.nodes["b"].host, cluster.nodes["b"].cwd) == ("g", "/x")
    assert cluster.origin.find("nodes.b.cwd").line == 3


def test_a_value_that_contains_itself_is_refused(load):
    """An alias of its own parent is an error, not an endless walk."""
    with pytest.raises(ConfigError):
        load("nodes: &x\n  a:\n    env: *x\n")


def test_duplicates_do_not_show_their_values(load):
    """The error about a key given twice does not print the values, which may be secret."""
    with pytest.raises(ConfigError, match="'TOKEN' is given twice") as caught:
        load("nodes: {a: {env: {TOKEN: hunter2, TOKEN: hunter3}}}")
    assert "hunter" not in str(caught.value)


def test_where_a_config_came_from_is_no_part_of_it(load):
    """Configs are equal whether they came from a file or from Python."""
    assert load(YAML) == parse_config(json.loads(JSON))
    assert load(YAML).origin.find("nodes.a.host").line == 5
    assert parse_config(json.loads(JSON)).origin.find("nodes.a.host") is None


def test_a_resolved_config_remembers_the_lines(load, tmp_path):
    """What a launcher hands on is the same config, and its errors name the person's own file."""
    cluster = load(YAML, set=["rpc.threads=9"])
    dumped = json.loads(json.dumps(dump_config(cluster)))
    path = tmp_path / "resolved.json"
    path.write_text(json.dumps(dumped))
    for other in (parse_config(dumped), load_config(path)):
        assert other == cluster
        assert config_hash(other) == config_hash(cluster)
        assert other.origin.find("nodes.a.mounts.data") == cluster.origin.find(
            "nodes.a.mounts.data"
        )
        assert str(other.origin.find("rpc.threads")) == "--set"
        assert other.origin.file == cluster.origin.file
    dumped["nodes"]["a"]["mounts"]["data"] = "x"
    with pytest.raises(ConfigError, match=r"c\.yaml:6:14: nodes\.a\.mounts\.data: 'x' is relative"):
        parse_config(dumped)
    with pytest.raises(ConfigError, match="not written by mmrpc"):
        parse_config({**dumped, "$origin": {"places": [3]}})


def test_parse_config_leaves_its_argument_alone():
    """``set`` changes the result, not the dicts that were given."""
    tree = json.loads(JSON)
    assert parse_config(tree, ["rpc.threads=9"]).rpc.threads == 9
    assert tree == json.loads(JSON)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_json_is_read_as_it_was_written(value):
    """Whatever JSON can hold comes back the same, each key with a place."""
    tree, places = parse_text(json.dumps({"x": value}), "c.json", "json")
    assert tree == {"x": value}
    assert ("x",) in places
