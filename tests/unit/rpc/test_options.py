"""Which transport is chosen, and by whom."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed.rpc as torch_rpc

from mmrpc import rpc
from mmrpc.rpc import options


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch's class is given."""
    seen: dict[str, Any] = {}
    original = torch_rpc.TensorPipeRpcBackendOptions.__init__

    def record(self: Any, **kwargs: Any) -> None:
        seen.update(kwargs)
        original(self, **kwargs)

    record.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch_rpc.TensorPipeRpcBackendOptions, "__init__", record)
    monkeypatch.delenv("MMRPC_TRANSPORTS", raising=False)
    return seen


def test_the_default_sleeps_while_it_waits(passed: dict[str, Any]) -> None:
    """TCP and the basic channel; the options are torch's own in all else."""
    made = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=3)
    assert isinstance(made, torch_rpc.TensorPipeRpcBackendOptions)
    assert (made.num_worker_threads, made.rpc_timeout) == (4, 3)
    assert passed["_transports"] == ["uv"]
    assert passed["_channels"] == ["basic"]


def test_a_choice_in_the_program_stands(passed: dict[str, Any]) -> None:
    """Nothing is added to it."""
    rpc.TensorPipeRpcBackendOptions(_transports=["shm", "uv"])
    assert passed["_transports"] == ["shm", "uv"]
    assert "_channels" not in passed


@pytest.mark.parametrize(
    ("value", "expected"),
    [("default", None), ("shm, uv", ["shm", "uv"]), ("uv", ["uv"])],
)
def test_a_choice_in_the_environment_stands(
    passed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, value: str, expected: Any
) -> None:
    """Where the program made none."""
    monkeypatch.setenv("MMRPC_TRANSPORTS", value)
    rpc.TensorPipeRpcBackendOptions()
    assert passed.get("_transports") == expected


def test_where_torch_has_no_such_option_its_choice_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are private, and may go."""

    def bare(self: Any, *, num_worker_threads: int = 16) -> None: ...

    monkeypatch.setattr(torch_rpc.TensorPipeRpcBackendOptions, "__init__", bare)
    assert options._quiet_transport() == {}


def test_too_few_threads_are_warned_about() -> None:
    """With what will not work."""
    with pytest.warns(UserWarning, match="nested call"):
        rpc.TensorPipeRpcBackendOptions(num_worker_threads=1)
