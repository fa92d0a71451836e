"""A config as data for people and editors: values with sources, and the schema."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from mmrpc import config
from mmrpc.config import json_schema, load_config, parse_config, settings
from mmrpc.config.secrets import MASK, is_secret, mask


def test_each_value_has_a_source(tmp_path):
    """Every value says whether it is a default, from a line of the file, or set."""
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n  a: {host: h}\n  b: {host: g}\nlogs: {tee: [all]}\n")
    found = {s.key: (s.value, s.source) for s in settings(load_config(path, ["rpc.threads=4"]))}
    assert found["nodes.a.host"] == ("h", f"{path}:2:7")
    assert found["rpc.threads"] == (4, "--set")
    assert found["rpc.timeout_s"] == (60.0, "default")
    assert found["master.node"] == ("a", "default")
    assert found["logs.tee"] == (["all"], f"{path}:4:8")
    assert found["nodes.a.env"] == ({}, "default")


def test_every_value_is_shown():
    """Put together again, what is shown is the config."""
    cluster = parse_config({"nodes": {"a": {}}, "mounts": {}})
    tree: dict = {}
    for setting in settings(cluster):
        *path, last = setting.key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[last] = setting.value
    assert tree == cluster.model_dump(mode="json")


def test_secrets_are_hidden():
    """Neither variables with telling names nor passwords in URLs are shown."""
    env = {"HF_TOKEN": "hunter2", "PROXY": "http://me:hunter2@host", "N": "1"}
    shown = settings(parse_config({"nodes": {"a": {"env": env}}}))
    assert "hunter2" not in str(shown)
    assert {s.value for s in shown if s.key.startswith("nodes.a.env.")} == {
        MASK,
        f"http://{MASK}@host",
        "1",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AWS_SECRET_ACCESS_KEY", True),
        ("AWS_ACCESS_KEY_ID", True),
        ("WANDB_API_KEY", True),
        ("DB_PASSWORD", True),
        ("GITHUB_PAT", True),
        ("token", True),
        ("OMP_NUM_THREADS", False),
        ("KEYBOARD", False),
        ("PATH", False),
        ("AUTHOR", False),
    ],
)
def test_names_tell_secrets(name, expected):
    """The usual names of secrets are known, and words that only look like them are not."""
    assert is_secret(name) is expected


def test_masking_copies():
    """Masking leaves the original as it is."""
    tree = {"nodes": [{"env": {"TOKEN": "x"}}]}
    assert mask(tree) == {"nodes": [{"env": {"TOKEN": MASK}}]}
    assert tree == {"nodes": [{"env": {"TOKEN": "x"}}]}


def test_the_schema_describes_every_key():
    """Editors get a schema in which each key has a description, and unknown keys are errors."""
    schema = json_schema()
    json.dumps(schema)
    assert schema["required"] == ["nodes"]
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
        for key, value in part["properties"].items():
            assert value["description"], key


def test_every_model_documents_its_fields():
    """The docstring of each model names each of its fields."""
    for name in config.__all__:
        model = getattr(config, name)
        if isinstance(model, type) and issubclass(model, BaseModel):
            for field in model.model_fields:
                assert f"    {field}: " in (model.__doc__ or ""), f"{name}.{field}"
