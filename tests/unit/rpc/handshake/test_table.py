"""The handshake's report as text."""

from __future__ import annotations

from mmrpc.rpc.handshake.report import MountReport, NodeReport, PathReport
from mmrpc.rpc.handshake.table import LEAD, render


def _node(name: str, *ranks: int) -> NodeReport:
    return NodeReport(
        node=name, host=name, address=f"{name}.lan", ranks=ranks, mmrpc="1", torch="2", python="3"
    )


def test_nodes_mounts_and_warnings_are_told() -> None:
    """One row per mount and node, in columns; what is not known is a dash."""
    report = PathReport(
        nodes=(_node("a", 0), _node("b", 1, 2)),
        mounts=(
            MountReport(
                mount="data", node="a", path="/mnt/a", file_system="nfs4", readable=True,
                writable=False, proof="id-file", reader="prefetch",
            ),
            MountReport(mount="data", node="b", path="s3://bucket", implementation="s3fs 1"),
        ),
        warnings=("torch differs",),
    )  # fmt: skip
    lines = [line.removeprefix(LEAD) for line in render(report).splitlines()]
    assert all(line.startswith(LEAD) for line in render(report).splitlines())
    assert lines[0] == "3 workers have met, on a (a.lan), b (b.lan)"
    assert lines[2].split() == [
        *("data", "a", "/mnt/a", "nfs4", "yes", "no", "id-file", "prefetch"),
    ]
    assert lines[3].split() == ["data", "b", "s3://bucket", "s3fs", "1", "no", "-", "-", "-"]
    assert lines[1].index("READ") == lines[2].index("yes")
    assert lines[4] == "warning: torch differs"
    assert str(report).splitlines() == lines


def test_a_cluster_without_mounts_is_one_line() -> None:
    """There is no empty table."""
    assert render(PathReport(nodes=(_node("a", 0),))).count("\n") == 0
