"""The README does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from mmrpc.config import RpcConfig
from mmrpc.rpc.spool import policy
from mmrpc.testing import free_port
from tests.documents import ROOT, blocks, run

README = ROOT / "README.md"


@pytest.mark.timeout(110)
def test_example_runs(tmp_path) -> None:
    """The example is complete, and prints what the shared tensor then holds."""
    example = blocks(README, "python")[0]
    printed = run(example.replace("29500", str(free_port())), tmp_path)
    assert printed.split(" ", 1)[0] == "1000000.0"
    assert printed.strip().endswith(str(tmp_path / "x.mm"))


def test_data_program_runs(tmp_path) -> None:
    """The program with a dataset, a safetensors file and a tree ends well, again and again."""
    for _ in range(2):
        run(blocks(README, "python")[1], tmp_path)


@pytest.mark.timeout(110)
def test_job_is_launched(tmp_path) -> None:
    """The job learns when the config starts it, here with both nodes on this machine."""
    (tmp_path / "params").mkdir()
    job, config = blocks(README, "python")[2], blocks(README, "yaml")[0]
    for written, here in [
        ("/srv/params", str(tmp_path / "params")),
        ("/mnt/nfs/params", str(tmp_path / "params")),
        ("/opt/venv/bin/python", sys.executable),
    ]:
        assert written in job + config
        job, config = job.replace(written, here), config.replace(written, here)
    (tmp_path / "job.py").write_text(job)
    (tmp_path / "cluster.yaml").write_text(config)
    settings = ["launch.via=local", "nodes.a.host=127.0.0.1", "nodes.b.host=127.0.0.1"]
    for command in re.findall(r"^    mmrpc (.*?) +#", README.read_text(), re.MULTILINE):
        done = subprocess.run(
            [sys.executable, "-m", "mmrpc.cli", *command.split()]
            + [part for setting in settings for part in ("--set", setting)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (loss,) = re.findall(r"100 steps, loss ([\d.]+)", done.stdout)
    assert float(loss) < 0.1


def test_no_block_is_left_out() -> None:
    """The blocks that the tests above run are all there are; the others are no programs."""
    languages = re.findall(r"^```(\w*)$", README.read_text(), re.MULTILINE)
    assert sorted(filter(None, languages)) == ["python", "python", "python", "yaml"]


def test_size_of_shared_tensors() -> None:
    """The size from which tensors go through shared memory is the default, in both places."""
    (mib,) = re.findall(r"From (\d+) MiB up", README.read_text())
    assert int(mib) << 20 == policy.DEFAULT_SHARE_ABOVE_BYTES == RpcConfig().share_above_bytes
    assert f"`{policy._VARIABLE}`" in README.read_text()


def test_every_document_is_reachable() -> None:
    """The README links to every page of docs/."""
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r"\]\(([^)#]+)", README.read_text()))


def test_readme_is_short() -> None:
    """The README stays something that one reads."""
    assert len(README.read_text().splitlines()) < 200


def test_demo_runs_what_is_there() -> None:
    """The files that `make demo` names exist."""
    recipe = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]
    files = re.findall(r"\b(?:configs|examples)/\w+\.\w+", recipe)
    assert len(files) >= 2
    assert all((ROOT / file).exists() for file in files)


def test_commands_are_targets() -> None:
    """Every make target that the README names is in the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^    make (\w+)", README.read_text(), re.MULTILINE))
    assert named
    assert named <= targets


def test_extras_exist() -> None:
    """Every extra that the README names is in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r'"\.\[(\w+)\]"', README.read_text())) <= set(
        project["optional-dependencies"]
    )
