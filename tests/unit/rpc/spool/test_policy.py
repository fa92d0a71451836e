"""From which size on tensors go through shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mmrpc.core.system import libc
from mmrpc.errors import ConfigError
from mmrpc.rpc.spool import policy
from mmrpc.rpc.spool.peers import Address

LARGE = torch.ones(1 << 12)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No slots stay behind."""
    yield
    policy.close()


def receiver() -> Address:
    return Address.own()._replace(opens=True)


def test_the_environment_says_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of that many bytes goes through memory, a smaller one does not."""
    monkeypatch.setattr(libc, "is_dumpable", lambda: True)
    monkeypatch.setenv("MMRPC_SHARE_ABOVE_BYTES", str(LARGE.nbytes))
    policy.configure()
    assert policy.offer(LARGE, receiver()) is not None
    assert policy.offer(LARGE[1:], receiver()) is None


def test_nothing_is_shared_where_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a config says comes before the environment."""
    monkeypatch.setenv("MMRPC_SHARE_ABOVE_BYTES", "1")
    policy.configure(0)
    assert policy.offer(LARGE, receiver()) is None


@pytest.mark.parametrize("text", ["8MiB", "-1", "", "1.5"])
def test_what_is_no_number_of_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The error names the variable, and says how to write it."""
    monkeypatch.setenv("MMRPC_SHARE_ABOVE_BYTES", text)
    with pytest.raises(ConfigError, match=r"MMRPC_SHARE_ABOVE_BYTES.* without a unit"):
        policy.configure()


@pytest.mark.parametrize(
    "odd",
    [
        LARGE.view(64, 64).t(),
        LARGE.clone().requires_grad_(),
        LARGE.to(torch.complex64).conj(),
        LARGE.to_sparse(),
    ],
    ids=["transposed", "grad", "conj", "sparse"],
)
def test_what_is_not_plain_goes_as_ever(odd: torch.Tensor) -> None:
    """Only a plain run of bytes can be copied into a slot as it is."""
    policy.configure(1)
    assert policy.offer(odd, receiver()) is None
