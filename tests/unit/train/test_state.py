"""A training state that survives its process, and is never taken for whole when it is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from mmrpc.core.system import host
from mmrpc.errors import LayoutError, PathExistsError, UnsupportedTensorError
from mmrpc.train import optimizers
from mmrpc.train.state import FILE_NAME, TrainingState
from mmrpc.train.versions import Versions


def model(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))


def adam(params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def open_state(directory, module=None, *, resume=True, trust_live=True) -> TrainingState:
    return TrainingState(
        module or model(),
        adam,
        str(directory),
        Versions(directory),
        resume=resume,
        trust_live=trust_live,
    )


def train(state: TrainingState, steps: int) -> None:
    for seed in range(steps):
        torch.manual_seed(seed)
        state.module.zero_grad()
        state.module(torch.randn(8, 3)).square().sum().backward()
        state.step()


def values(state: TrainingState) -> list[torch.Tensor]:
    return [value.clone() for value in state.module.state_dict().values()]


def test_goes_on_where_it_was(tmp_path) -> None:
    """Parameters, buffers, optimizer state and the number of steps are those of before."""
    first = open_state(tmp_path)
    assert first.resumed_from is None
    train(first, 3)
    second = open_state(tmp_path)
    assert second.resumed_from == second.step_number == 3
    assert all(map(torch.equal, values(second), values(first)))


def test_half_a_step_is_not_gone_on_from(tmp_path) -> None:
    """Killed inside a step, the newest version is the state, whole."""
    state = open_state(tmp_path)
    versions = Versions(tmp_path)
    train(state, 2)
    versions.publish(2, state.arena)
    whole = values(state)

    def killed() -> None:
        state.module[0].weight.data.fill_(99)
        raise KeyboardInterrupt

    state.optimizer.step = killed
    with pytest.raises(KeyboardInterrupt):
        train(state, 1)
    again = open_state(tmp_path)
    assert again.resumed_from == 2
    assert all(map(torch.equal, values(again), whole))


def test_a_state_that_was_never_filled_is_none(tmp_path) -> None:
    """Killed while the first values were copied, the file of zeros is not taken for a state."""
    state = open_state(tmp_path)
    state.arena.tensors["optim/#steps"].zero_()
    state.module[0].weight.data.zero_()
    again = open_state(tmp_path)
    assert again.resumed_from is None
    assert torch.equal(again.module[0].weight, model()[0].weight)


def test_of_another_boot_only_versions_count(tmp_path, monkeypatch) -> None:
    """After a crash of the machine the live file may be anything."""
    state = open_state(tmp_path)
    Versions(tmp_path).publish(0, state.arena)
    train(state, 2)
    monkeypatch.setattr(host, "host_id", lambda: "another")
    assert open_state(tmp_path).resumed_from == 0


def test_a_newer_version_wins(tmp_path) -> None:
    """What was published after the live file is gone on from."""
    state = open_state(tmp_path)
    train(state, 1)
    Versions(tmp_path).publish(5, state.arena)
    assert open_state(tmp_path).resumed_from == 5
    assert open_state(tmp_path, trust_live=False).step_number == 5


def test_another_module_is_refused(tmp_path) -> None:
    """Going on with a changed module says what differs, and leaves the state alone."""
    train(open_state(tmp_path), 2)
    with pytest.raises(LayoutError, match=r"has '0\.weight' as float32\[4, 3\] instead of"):
        open_state(tmp_path, model(5))
    assert open_state(tmp_path).resumed_from == 2


def test_starting_anew_over_a_state_is_refused(tmp_path) -> None:
    """Without resume, a state in the directory is not lost by mistake."""
    open_state(tmp_path)
    with pytest.raises(PathExistsError, match="has the state of a training"):
        open_state(tmp_path, resume=False)


def test_a_live_file_that_is_cut_is_not_used(tmp_path) -> None:
    """A file that is no whole arena is replaced, from the newest version."""
    state = open_state(tmp_path)
    Versions(tmp_path).publish(0, state.arena)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).write_bytes(b"x" * 100)
    assert open_state(tmp_path).resumed_from == 0


def test_state_dicts_go_out_and_in(tmp_path) -> None:
    """A state dict is a copy that brings another training to the same point."""
    (tmp_path / "a").mkdir()
    state = open_state(tmp_path / "a")
    train(state, 3)
    saved = state.state_dict()
    whole = values(state)
    train(state, 1)
    assert all(map(torch.equal, saved["module"].values(), whole))
    (tmp_path / "b").mkdir()
    other = open_state(tmp_path / "b")
    other.load_state_dict(saved)
    assert other.step_number == 1
    assert all(map(torch.equal, values(other), whole))
    train(other, 1)
    assert all(map(torch.equal, values(other), values(state)))
    plain = model()
    plain.load_state_dict(saved["module"])
    optimizer = adam(plain.parameters())
    optimizer.load_state_dict(saved["optimizer"])


def test_a_state_dict_of_another_module_is_refused(tmp_path) -> None:
    """Nothing is changed by one that does not fit."""
    state = open_state(tmp_path)
    before = values(state)
    with pytest.raises(LayoutError, match="the state dict has"):
        state.load_state_dict({"module": model(7).state_dict()})
    assert all(map(torch.equal, values(state), before))
    assert open_state(tmp_path).resumed_from == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"module": None}, "it is no state of a training"),
        ({"module": {"x": 5}}, "it is no state of a training"),
        ({"optimizer": {"state": {}}}, "the optimizer's state dict does not fit"),
        ({"optimizer": 5}, "the optimizer's state dict does not fit"),
    ],
)
def test_a_state_that_is_none_changes_nothing(tmp_path, change, problem: str) -> None:
    """A part that does not fit is found before the other is taken."""
    state = open_state(tmp_path)
    train(state, 2)
    before = values(state)
    saved = {**state.state_dict(), **change}
    for value in saved["module"] or ():
        if isinstance(saved["module"][value], torch.Tensor):
            saved["module"][value].zero_()
    with pytest.raises(LayoutError, match=problem):
        state.load_state_dict(saved)
    assert all(map(torch.equal, values(state), before))
    assert open_state(tmp_path).resumed_from == 2


def test_the_state_of_another_optimizer_is_refused(tmp_path) -> None:
    """Momentum is nothing that Adam keeps: neither it nor the parameters are taken."""
    state = open_state(tmp_path)
    train(state, 1)
    before = values(state)
    module = model()
    other = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.randn(8, 3)).sum().backward()
    other.step()
    saved = {"module": module.state_dict(), "optimizer": other.state_dict()}
    with pytest.raises(LayoutError, match="the optimizer's state dict does not fit"):
        state.load_state_dict(saved)
    assert all(map(torch.equal, values(state), before))
    train(state, 1)


def test_a_damaged_version_says_what_to_do(tmp_path) -> None:
    """Going on from a version that was cut is refused, and the one before is not lost."""
    state = open_state(tmp_path)
    versions = Versions(tmp_path)
    versions.publish(0, state.arena)
    train(state, 1)
    cut = versions.publish(1, state.arena).filename
    whole = values(state)
    data = Path(cut).read_bytes()
    Path(cut).unlink()
    Path(cut).write_bytes(data[:-1])
    with pytest.raises(LayoutError, match=r"tells of.*Move it away to go on from the version b"):
        open_state(tmp_path, trust_live=False)
    Path(cut).unlink()
    assert open_state(tmp_path, trust_live=False).resumed_from == 0
    Path(cut).write_bytes(data)
    again = open_state(tmp_path, trust_live=False)
    assert all(map(torch.equal, values(again), whole))


def test_a_training_that_cannot_begin_leaves_nothing(tmp_path, monkeypatch) -> None:
    """When the first values cannot be written, the next try finds an empty directory."""

    def fail(*_: object) -> None:
        raise UnsupportedTensorError("it keeps something else")

    with monkeypatch.context() as patched:
        patched.setattr(optimizers, "adopt", fail)
        with pytest.raises(UnsupportedTensorError, match="something else"):
            open_state(tmp_path)
    assert not (tmp_path / FILE_NAME).exists()
    assert open_state(tmp_path, resume=False).resumed_from is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = self.a


def test_a_safetensors_file_is_a_state_dict(tmp_path) -> None:
    """What the format's own library reads from a version can be loaded, tied weights too."""
    from safetensors.torch import load_file

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    state = open_state(tmp_path / "a", Tied())
    version = Versions(tmp_path / "a").publish(0, state.arena)
    other = open_state(tmp_path / "b", Tied())
    other.load_state_dict({"module": load_file(version.filename)})
    assert torch.equal(other.module.b.weight, state.module.a.weight)
    other.load_state_dict(state.state_dict())
    assert other.step_number == 2


def test_a_copied_version_starts_another_training(tmp_path) -> None:
    """A version's file in an empty directory is all that a server needs to go on from it."""
    (tmp_path / "a").mkdir()
    state = open_state(tmp_path / "a")
    train(state, 3)
    version = Versions(tmp_path / "a").publish(3, state.arena)
    (tmp_path / "b").mkdir()
    shutil.copy(version.filename, tmp_path / "b")
    other = open_state(tmp_path / "b")
    assert other.resumed_from == 3
    train(state, 1)
    train(other, 1)
    assert all(map(torch.equal, values(other), values(state)))
