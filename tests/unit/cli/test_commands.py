"""The commands that look at a config and at files: what they print and how they exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import mmrpc
from mmrpc.cli import app
from mmrpc.config import json_schema

NARROW = {"COLUMNS": "40"}
"""A terminal that none of the tables fits into: nothing may be cut or folded for it."""


@pytest.fixture
def cluster(tmp_path):
    """A config of two nodes with one directory, and what writes it anew."""

    def write(**roots):
        for mount in ("data", "params"):
            (tmp_path / mount).mkdir(exist_ok=True)
        lines = [
            "name: job",
            "mounts: {data: {access: read}, params: {access: write}}",
            f"logs: {{dir: {tmp_path}/runs}}",
            "nodes:",
        ]
        for node in "ab":
            places = {mount: str(tmp_path / mount) for mount in ("data", "params")}
            places |= roots.get(node, {})
            lines += [f"  {node}:", "    env: {API_TOKEN: hunter2}", "    mounts:"]
            lines += [f"      {mount}: {place}" for mount, place in places.items()]
        path = tmp_path / "cluster.yaml"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env=NARROW)


def test_one_node_is_checked(cluster, tmp_path):
    """With --node, this machine is looked at as that node, and the exit code is 0."""
    done = run("check", cluster(), "--node", "a")
    assert done.exit_code == 0, done.output
    assert "All is well." in done.output
    lines = [line.split() for line in done.output.splitlines()[1:3]]
    assert [(words[0], words[1], words[-1]) for words in lines] == [
        (mount, "a", str(tmp_path / mount)) for mount in ("data", "params")
    ]


def test_a_path_that_fails_exits_with_3(cluster, tmp_path):
    """A missing directory is told with node, mount, path and line, and the exit code is 3."""
    path = cluster(b={"params": "/no/such/place"})
    done = run("check", path, "--node", "b")
    assert done.exit_code == 3
    assert "'/no/such/place' (mount 'params'): no such directory" in done.output
    assert f"[{path}:" in done.output
    found = json.loads(run("check", path, "--node", "b", "--json").output)
    assert {m["mount"]: m["readable"] for m in found["mounts"]} == {"data": True, "params": False}
    assert len(found["problems"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "rpc.thread=3"], "did you mean 'threads'"),
        (["--node", "c"], "there is no node 'c'"),
        (["--set", "nodes.a.mounts.data=relative"], "is relative"),
    ],
)
def test_a_wrong_config_exits_with_2(cluster, arguments, words):
    """A config error is one sentence on stderr, and the exit code is 2."""
    done = run("check", cluster(), *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.output


def test_all_nodes_are_checked_against_each_other(cluster, tmp_path):
    """Without --node, every node takes part in the handshake, and the matrix is printed."""
    command = [sys.executable, "-m", "mmrpc.cli", "check"]
    done = subprocess.run(
        [*command, cluster(), "--json"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(m["mount"], m["node"], m["proof"]) for m in found["mounts"]] == [
        (mount, node, "nonce") for mount in ("data", "params") for node in "ab"
    ]
    for directory in ("params", "data", "runs"):
        assert os.listdir(tmp_path / directory) == []


def test_another_directory_is_found_by_a_check(cluster, tmp_path):
    """Two nodes with two directories fail the check of all nodes, with the line of the file."""
    (tmp_path / "other").mkdir()
    path = cluster(b={"params": str(tmp_path / "other")})
    command = [sys.executable, "-m", "mmrpc.cli", "check", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 3, done.stderr
    assert f"{tmp_path}/other' (mount 'params'): this is not the directory that a has" in (
        done.stdout
    )
    assert f"[{path}:14:7]" in done.stdout


def test_the_id_file_is_made_for_read_mounts(cluster, tmp_path):
    """--write-id makes it where jobs only read, once."""
    path = cluster()
    assert run("check", path, "--node", "a", "--write-id").exit_code == 0
    text = (tmp_path / "data" / ".mmrpc-mount").read_text()
    assert len(text) == 32
    assert run("check", path, "--node", "b", "--write-id").exit_code == 0
    assert (tmp_path / "data" / ".mmrpc-mount").read_text() == text
    assert not (tmp_path / "params" / ".mmrpc-mount").exists()


def test_show_tells_values_and_sources(cluster):
    """Every value stands with its source, and secrets are hidden."""
    path = cluster()
    done = run("show", path, "--set", "rpc.threads=3")
    lines = dict(line.split(" = ", 1) for line in done.output.splitlines() if " = " in line)
    assert lines["name"].split("#") == [
        '"job" '.ljust(len(lines["name"].split("#")[0])),
        f" {path}:1:1",
    ]
    assert lines["rpc.threads"].endswith("# --set")
    assert lines["rpc.verify"].endswith("# default")
    assert "hunter2" not in done.output
    rows = json.loads(run("show", path, "--json").output)
    assert {"key": "name", "value": "job", "source": f"{path}:1:1"} in rows


def test_the_schema_is_printed():
    """The schema is the one of the models."""
    assert json.loads(run("schema").output) == json_schema()


def test_a_file_is_inspected(tmp_path):
    """The tensors of a file are listed with dtype, shape and size."""
    mmrpc.save_tree(tmp_path / "tree", {"a": torch.zeros(2, 3), "b": {"c": torch.ones(4)}})
    found = json.loads(run("inspect", str(tmp_path / "tree"), "--json").output)
    assert {
        row["name"]: (row["dtype"], row["shape"], row["nbytes"]) for row in found["tensors"]
    } == {
        "a": ("float32", [2, 3], 24),
        "b.c": ("float32", [4], 16),
    }


def test_a_reference_is_inspected(tmp_path):
    """A reference says where it points, and whether it opens here."""
    tensor = mmrpc.MemoryMappedTensor.from_tensor(torch.arange(3), filename=tmp_path / "x")
    text = tensor.ref().to_json()
    (tmp_path / "ref.json").write_text(text)
    for what in (text, str(tmp_path / "ref.json")):
        done = run("inspect", what)
        assert done.exit_code == 0, done.output
        assert done.output.endswith("It opens here:\n-  int64  [3]  24 bytes\n")
    os.unlink(tmp_path / "x")
    done = run("inspect", text)
    assert done.exit_code == 3
    assert "It does not open here" in done.output


@pytest.mark.parametrize(
    "what", ["{}", "/no/such/file.npy", '{"a": ', "noise.json", "raw", "s3://bucket/x", "."]
)
def test_what_cannot_be_inspected_exits_with_3(what, tmp_path, monkeypatch):
    """A broken reference or a missing file is one sentence, without a traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noise.json").write_bytes(b"\xff\x00")
    (tmp_path / "raw").write_bytes(bytes(100))
    done = run("inspect", what)
    assert done.exit_code == 3
    assert "Traceback" not in done.output
    assert done.stderr.strip()


def test_the_version_is_printed():
    """It is what a report of a fault begins with."""
    done = run("--version")
    assert (done.exit_code, done.output) == (0, f"mmrpc {mmrpc.__version__}\n")


def test_commands_are_imported_when_they_run():
    """Help needs neither torch nor the models of the config."""
    code = (
        "import sys; from typer.testing import CliRunner; from mmrpc.cli import app;"
        "CliRunner().invoke(app, ['schema', '--help']);"
        "print([name for name in ('torch', 'mmrpc.config') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
