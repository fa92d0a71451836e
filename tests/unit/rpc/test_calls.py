"""What of a call can be seen without a group."""

from __future__ import annotations

import operator
from pathlib import Path

import torch

from mmrpc import MemoryMappedTensor
from mmrpc.rpc import calls


def test_message_nbytes_counts_what_torch_gets(tmp_path: Path) -> None:
    """The bytes of the call, and those of tensors by value, wherever they are."""
    empty = calls.message_nbytes(operator.getitem, ([],))
    by_value = calls.message_nbytes(operator.getitem, ([torch.zeros(1000)],), {})
    assert empty < 300
    assert 4000 < by_value < 4000 + 300
    mapped = MemoryMappedTensor.zeros(1000, filename=tmp_path / "x.bin")
    assert calls.message_nbytes(operator.getitem, (), {"x": mapped}) < 1000
