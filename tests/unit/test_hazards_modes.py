"""Hazards of modes: who may only read is told, and private writes never vanish silently."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch

from mmrpc import MemoryMappedTensor, TensorRef, errors, ref
from tests.needs import needs
from tests.peers import Peer, as_both_users

M = MemoryMappedTensor
F32 = torch.float32


def open_file(path: str, mode: str | None) -> MemoryMappedTensor:
    return M.from_filename(path, F32, (2048,), mode=mode)


@as_both_users
def test_modes(directory: str) -> None:
    """ "r+" writes to the file, "r" does not, and nothing else is a mode."""
    path = M.zeros(2048, filename=f"{directory}/x").filename
    private, shared, default = (open_file(path, mode) for mode in ("r", "r+", None))
    private[0] = 1
    assert shared[0] == 0
    shared[1] = 2
    assert default[1] == open_file(path, "r")[1] == 2
    for mode in ("w", "rw", "", "R", 3):
        with pytest.raises(ValueError, match="mode must be"):
            open_file(path, mode)


@as_both_users
def test_private_writes_are_not_sent(directory: str) -> None:
    """A tensor of mode "r" that was written to is refused with a reason, however it is sent."""
    path = M.zeros(2048, filename=f"{directory}/x").filename
    x = open_file(path, "r")
    pickle.dumps(x)
    x[5] = 1
    for send in (
        pickle.dumps,
        ref,
        lambda x: x.ref().to_json(),
        lambda x: ref(x.view(-1)[:8]),
        lambda x: pickle.dumps({"a": [x[:9]]}),
        lambda x: pickle.dumps(x.view(-1).untyped_storage()),
        lambda x: x.flush(),
    ):
        with pytest.raises(errors.NotSharedError, match="was written"):
            send(x)
    assert pickle.loads(pickle.dumps(x.clone()))[5] == 1
    assert copy.deepcopy(x)[5] == 1
    assert M.from_tensor(x)[5] == 1
    assert ref(x[1024:]).open().sum() == 0
    assert open_file(path, "r+")[5] == 0


@as_both_users
def test_mode_is_carried(directory: str) -> None:
    """The receiver's map is of the sender's kind."""
    path = M.zeros(2048, filename=f"{directory}/x").filename
    for mode in ("r", "r+"):
        x = open_file(path, mode)
        assert x.ref().mode == mode
        assert TensorRef.from_json(x.ref().to_json()).mode == mode
        assert pickle.loads(pickle.dumps(x)).ref().mode == mode
        assert pickle.loads(pickle.dumps(x))[1:].ref().mode == mode


@as_both_users
def test_choice_of_the_receiver(directory: str) -> None:
    """A reference can be opened in the other mode, if one says so."""
    x = M.zeros(4, filename=f"{directory}/x")
    private = x.ref().open("r")
    private.fill_(1)
    assert x.sum() == 0
    shared = open_ref_of_private(x.filename).open("r+")
    shared.fill_(2)
    assert x.sum() == 8


def open_ref_of_private(path: str) -> TensorRef:
    return M.from_filename(path, F32, (4,), mode="r").ref()


def total(x: torch.Tensor | TensorRef, mode: str | None = None) -> float:
    return float((x.open(mode) if isinstance(x, TensorRef) else x).sum())


def default_mode(path: str) -> str:
    return M.from_filename(path, F32, (4,)).ref().mode.value


def write(path: str, mode: str) -> None:
    M.from_filename(path, F32, (4,), mode=mode).fill_(9)


@needs("root")
def test_who_may_only_read(shared_dir: str, other_user: Peer) -> None:
    """A receiver who may not write what the sender maps writable is told so, not fooled."""
    x = M.ones(4, filename=f"{shared_dir}/x")
    os.chmod(x.filename, 0o644)
    for sent in (x, x.ref(), x[1:]):
        with pytest.raises(errors.PathNotWritableError) as caught:
            other_user.call(total, sent)
        assert isinstance(caught.value, PermissionError)
        assert caught.value.path == x.filename
    assert other_user.call(total, x.ref(), "r") == 4
    assert other_user.call(default_mode, x.filename) == "r"
    with pytest.raises(errors.PathNotWritableError):
        other_user.call(write, x.filename, "r+")
    other_user.call(write, x.filename, "r")
    assert x.sum() == 4


@needs("root")
def test_who_may_not_read(shared_dir: str, other_user: Peer) -> None:
    """A receiver who may not even read is told that."""
    x = M.ones(4, filename=f"{shared_dir}/x")
    os.chmod(x.filename, 0o600)
    for sent, mode in ((x, None), (x.ref(), "r"), (x.ref(), "r+")):
        with pytest.raises(errors.PathNotReadableError, match="uid 65534"):
            other_user.call(total, sent, mode)
    with pytest.raises(errors.PathNotReadableError):
        other_user.call(total, M.ones(4))  # anonymous memory of another user
