"""What was received is kept for a moment."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from mmrpc import MemoryMappedTensor, errors
from mmrpc.core.mapping import _live
from mmrpc.core.resolver import HostResolver, set_resolver
from mmrpc.rpc import kept
from mmrpc.rpc.kept import KeepingResolver


def mapped(path) -> bool:
    gc.collect()
    return any(str(path) == name for name, _ in list(_live))


def test_a_received_mapping_outlives_its_tensor(tmp_path) -> None:
    """The second call finds the mapping of the first, and `close` lets go of it."""
    x = MemoryMappedTensor.from_tensor(torch.arange(4.0), filename=tmp_path / "x")
    reference = x.ref()
    del x
    assert not mapped(tmp_path / "x")
    resolver = KeepingResolver(HostResolver("here"))
    before = set_resolver(resolver)
    try:
        reference.open()
        assert mapped(tmp_path / "x")
        assert resolver.node == "here"
    finally:
        set_resolver(before)
        resolver.close()
    assert not mapped(tmp_path / "x")


def test_it_is_let_go_after_a_while(tmp_path) -> None:
    """Nobody has to ask for anything: the file's space is free again after some seconds."""
    x = MemoryMappedTensor.from_tensor(torch.arange(4.0), filename=tmp_path / "x")
    reference = x.ref()
    del x
    resolver = KeepingResolver(HostResolver(), keep_s=0.05)
    resolver.attach(reference.location, reference.mode, 16)
    waited = threading.Event()
    for _ in range(600):
        if not mapped(tmp_path / "x"):
            break
        waited.wait(0.1)
    assert not mapped(tmp_path / "x")


def test_not_more_than_some_are_kept(tmp_path, monkeypatch) -> None:
    """The oldest makes room for the newest."""
    monkeypatch.setattr(kept, "KEEP_AT_MOST", 2)
    resolver = KeepingResolver(HostResolver())
    for name in "abc":
        x = MemoryMappedTensor.from_tensor(torch.arange(4.0), filename=tmp_path / name)
        resolver.attach(x.ref().location, x.ref().mode, 16)
        del x
    assert [mapped(tmp_path / name) for name in "abc"] == [False, True, True]
    resolver.close()


def test_a_private_mapping_is_not_kept(tmp_path) -> None:
    """What is mapped copy-on-write goes with its tensor."""
    x = MemoryMappedTensor.from_tensor(torch.arange(4.0), filename=tmp_path / "x")
    reference = x.ref()
    del x
    resolver = KeepingResolver(HostResolver())
    before = set_resolver(resolver)
    try:
        reference.open(mode="r")
        assert not mapped(tmp_path / "x")
    finally:
        set_resolver(before)
        resolver.close()


@pytest.mark.parametrize("change", ["replaced", "removed", "truncated"])
def test_a_kept_mapping_is_given_only_while_its_name_has_the_file(tmp_path, change: str) -> None:
    """The same location again: the file is looked at, and what it is now decides."""
    path = tmp_path / "x"
    x = MemoryMappedTensor.from_tensor(torch.arange(4.0), filename=path)
    location = x.ref().location
    resolver = KeepingResolver(HostResolver())
    first = resolver.attach(location, x.ref().mode, 16)
    assert resolver.attach(location, x.ref().mode, 16) is first
    with pytest.raises(errors.FileTooShortError):
        resolver.attach(location, x.ref().mode, 17)
    if change == "replaced":
        MemoryMappedTensor.from_tensor(torch.ones(4), filename=path, existsok=True)
        expected: type[Exception] = errors.StaleReferenceError
    elif change == "removed":
        path.unlink()
        expected = errors.PathNotFoundError
    else:
        os.truncate(path, 8)
        expected = errors.FileTooShortError
    with pytest.raises(expected):
        resolver.attach(location, first.mode, 16)
    resolver.close()


def test_a_process_without_a_thread_to_spare_still_opens(tmp_path, monkeypatch) -> None:
    """The call succeeds, and what comes when there are threads again is let go in time."""
    x = MemoryMappedTensor.from_tensor(torch.arange(4.0), filename=tmp_path / "x")
    reference = x.ref()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = KeepingResolver(HostResolver())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        resolver.attach(reference.location, reference.mode, 16)
    assert resolver._timer is None
    resolver.attach(reference.location, reference.mode, 16)
    assert resolver._timer is not None
    resolver.close()
