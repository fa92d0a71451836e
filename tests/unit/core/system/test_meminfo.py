"""How much memory can still be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrpc.core.system import meminfo


def test_system() -> None:
    """It is part of what the machine has."""
    with open("/proc/meminfo") as file:
        total_bytes = int(file.readline().split()[1]) * 1024
    available_bytes = meminfo.available_bytes()
    assert available_bytes is not None
    assert 0 < available_bytes < total_bytes


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("5000", "2000", 3000), ("5000", "6000", 0), ("max", "2000", None), ("", "2000", None)],
)
def test_container(
    limit: str, used: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a container's limit leaves counts, if there is one."""
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    monkeypatch.setattr(meminfo, "_CGROUP", str(tmp_path))
    assert meminfo._cgroup() == expected
    if expected is not None:
        assert meminfo.available_bytes() == expected


def test_nobody_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nothing is known, nothing is refused."""
    monkeypatch.setattr(meminfo, "_CGROUP", str(tmp_path))
    monkeypatch.setattr(meminfo, "_system", lambda: None)
    assert meminfo.available_bytes() is None
