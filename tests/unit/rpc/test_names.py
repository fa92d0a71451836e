"""The names of mmrpc.rpc are those of torch.distributed.rpc."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed.rpc as torch_rpc

from mmrpc import errors, rpc
from mmrpc.core.resolver import get_resolver

OTHERS = (
    *("functions", "WorkerInfo", "RpcBackendOptions", "PyRRef", "get_rpc_timeout"),
    *("TensorPipeRpcBackendOptions", "is_available"),
)


@pytest.mark.parametrize("name", sorted({*torch_rpc.__all__, *OTHERS}))
def test_a_public_name_of_torch_is_here(name: str) -> None:
    """So that one import makes the difference."""
    assert name in rpc.__all__
    assert hasattr(rpc, name)


@pytest.mark.parametrize("name", rpc.__all__)
def test_a_listed_name_is_there_and_documented(name: str) -> None:
    """The list holds nothing else."""
    assert getattr(rpc, name) is not None


@pytest.mark.parametrize("name", ["rpc_sync", "rpc_async", "remote", "init_rpc", "shutdown"])
def test_parameters_have_the_names_and_order_of_torchs(name: str) -> None:
    """Ours may come after them, by keyword."""
    theirs = list(inspect.signature(getattr(torch_rpc, name)).parameters)
    ours = inspect.signature(getattr(rpc, name)).parameters
    assert list(ours)[: len(theirs)] == theirs
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def test_an_rref_has_the_methods_of_torchs() -> None:
    """All public ones, with the same parameters."""
    for name, theirs in inspect.getmembers(torch_rpc.PyRRef):
        if not name.startswith("_"):
            ours = getattr(rpc.RRef, name)
            documented = (theirs.__doc__ or "").splitlines()[0]
            for parameter in list(inspect.signature(ours).parameters)[1:]:
                assert parameter in documented


def test_async_execution_is_torchs() -> None:
    """Functions that are decorated already need no change."""
    assert rpc.functions.async_execution is torch_rpc.functions.async_execution


def test_shutdown_of_a_process_in_no_group_does_nothing() -> None:
    """So that it can be called twice."""
    rpc.shutdown()


def test_calls_before_init_rpc_are_torchs_error() -> None:
    """It says what to do."""
    with pytest.raises(RuntimeError, match="has not been initialized"):
        rpc.rpc_sync("worker1", len, ([],))


@pytest.mark.parametrize(
    ("environment", "text"),
    [({}, "RANK is not set"), ({"RANK": "0", "WORLD_SIZE": "two"}, "'two' is not a number")],
)
def test_init_rpc_says_what_the_environment_lacks(
    environment: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When rank and world size were left out; nothing has changed then."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = get_resolver()
    with pytest.raises(errors.ConfigError, match=text):
        rpc.init_rpc()
    assert get_resolver() is before


def test_a_failed_init_rpc_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver is the one from before, and the next attempt starts afresh."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    before = get_resolver()
    for _ in range(2):
        with pytest.raises(ValueError, match="MASTER_ADDR"):
            rpc.init_rpc("w", rank=0, world_size=2)
        assert get_resolver() is before
