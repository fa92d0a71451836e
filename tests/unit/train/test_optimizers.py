"""Optimizers: any of torch's whose state can be mapped, and a reason for the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmrpc.errors import ConfigError, UnsupportedTensorError
from mmrpc.train import optimizers
from mmrpc.train.arena import Arena
from mmrpc.train.attach import specs_of
from mmrpc.train.state import TrainingState
from mmrpc.train.versions import Versions

OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    if name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
)


class Replacing(torch.optim.Optimizer):
    """Puts new tensors in the place of parameters and state, as some optimizers do."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["average"] = 0.9 * state.get("average", 0) + p.grad
            state["count"] = state.get("count", 0) + 1
            state["rate"] = 0.1 / state["count"]
            p.data = p.data - state["rate"] * state["average"]


def make(name: str):
    if name == "Replacing":
        return Replacing
    extra = {"momentum": 0.9, "weight_decay": 0.01} if name == "SGD" else {}
    return lambda params: getattr(torch.optim, name)(params, lr=0.01, **extra)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))


def backward(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    module.zero_grad()
    module(torch.randn(5, 3)).square().mean().backward()


def state_in(directory, factory, module: nn.Module | None = None) -> TrainingState:
    versions = Versions(directory)
    return TrainingState(
        module or model(), factory, str(directory), versions, resume=True, trust_live=True
    )


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Replacing"])
def test_steps_are_those_of_plain_memory(tmp_path, name: str) -> None:
    """On mapped memory, and opened again half way, an optimizer gives bit for bit the same."""
    plain = model()
    optimizer = make(name)(plain.parameters())
    mapped = state_in(tmp_path, make(name))
    for seed in range(6):
        if seed == 3:
            mapped = state_in(tmp_path, make(name))  # as a new process would
            assert mapped.resumed_from == 3
        backward(plain, seed)
        optimizer.step()
        backward(mapped.module, seed)
        mapped.step()
    for ours, theirs in zip(mapped.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert mapped.step_number == 6


def test_all_state_is_in_the_file(tmp_path) -> None:
    """After a step parameters and state are views of the arena, not copies."""
    state = state_in(tmp_path, make("Adam"))
    backward(state.module, 0)
    state.step()
    start = state.arena.data.data_ptr()
    inside = range(start, start + state.arena.nbytes)
    for p in state.module.parameters():
        assert p.data_ptr() in inside
        for value in state.optimizer.state[p].values():
            assert value.data_ptr() in inside


def test_an_optimizer_that_was_made_is_used(tmp_path) -> None:
    """It keeps its groups and what it had already learnt."""
    module = model()
    optimizer = torch.optim.SGD(
        [{"params": module[0].parameters(), "lr": 0.5}, {"params": module[2].parameters()}],
        lr=0.1,
        momentum=0.9,
    )
    backward(module, 0)
    optimizer.step()
    momentum = optimizer.state[module[0].weight]["momentum_buffer"].clone()
    state = state_in(tmp_path, optimizer, module)
    assert state.optimizer is optimizer
    assert torch.equal(optimizer.state[module[0].weight]["momentum_buffer"], momentum)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """A mistake that would train nothing is an error."""
    with pytest.raises(ValueError, match="not the module's"):
        optimizers.build(
            torch.optim.SGD(model().parameters(), lr=1), dict(model().named_parameters())
        )


class Listing(Replacing):
    """Keeps a list."""

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = [1]


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        (lambda params: torch.optim.LBFGS(params), "closure"),
        (Listing, "keeps 'history' as a list"),
    ],
)
def test_what_cannot_be_mapped_is_refused(tmp_path, factory, problem: str) -> None:
    """The reason names the optimizer, and its parameters are untouched."""
    module = model()
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(UnsupportedTensorError, match=problem):
        state_in(tmp_path, factory, module)
    assert all(map(torch.equal, module.parameters(), before))


class Growing(Replacing):
    """Begins to keep something in its second step."""

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["first" if not self.state[p] else "second"] = p.detach() * 2


def test_state_that_comes_later_is_refused(tmp_path) -> None:
    """What the trial did not show has no place, and is not lost without a word."""
    state = state_in(tmp_path, Growing)
    backward(state.module, 0)
    state.step()
    backward(state.module, 1)
    with pytest.raises(UnsupportedTensorError, match="second"):
        state.step()


def test_a_parameter_without_a_gradient_has_no_state(tmp_path) -> None:
    """It is left alone, also by weight decay, and after a restart."""
    for _ in range(2):
        state = state_in(tmp_path, make("SGD"))
        backward(state.module, 0)
        state.module[2].weight.grad = None
        state.step()
        assert not state.optimizer.state.get(state.module[2].weight)
    assert torch.equal(state.module[2].weight, model()[2].weight)


def test_probe_touches_nothing() -> None:
    """The trial step leaves optimizer, parameters and gradients as they were."""
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    backward(module, 0)
    before = [(p.clone(), p.grad.clone()) for p in module.parameters()]
    specs = optimizers.probe(optimizer, dict(module.named_parameters()), ())
    assert not optimizer.state
    assert "optim/0.weight/exp_avg" in specs
    for p, (value, gradient) in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert torch.equal(p.grad, gradient)


def test_numbers_are_kept_as_numbers(tmp_path) -> None:
    """An int or a float in the state comes back as that."""
    state = state_in(tmp_path, Replacing)
    backward(state.module, 0)
    state.step()
    again = state_in(tmp_path, Replacing)
    kept = again.optimizer.state[again.module[0].weight]
    assert kept["count"] == 1
    assert type(kept["count"]) is int
    assert kept["rate"] == 0.1


def test_specs_refuse_other_devices() -> None:
    """A parameter that cannot be mapped is named."""
    with pytest.raises(UnsupportedTensorError, match="'weight' is a tensor of meta"):
        specs_of(nn.Linear(2, 2, device="meta"))


def test_arena_of_a_state_is_readable_by_others(tmp_path) -> None:
    """The file is a safetensors file with the names of the state dict."""
    from safetensors.torch import load_file

    state = state_in(tmp_path, make("Adam"))
    found = load_file(state.arena.data.filename)
    for name, value in state.module.state_dict().items():
        assert torch.equal(found[name], value)
    assert isinstance(Arena.open(state.arena.data.filename), Arena)


class Counting(torch.optim.Optimizer):
    """An optimizer with something of its own besides its state."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})
        self.steps = [0]

    def step(self, closure=None) -> None:
        self.steps[0] += 1


def test_the_trial_does_not_touch_the_optimizer(tmp_path) -> None:
    """Hooks, schedulers and what an optimizer keeps for itself see real steps only."""
    module = model()
    optimizer = Counting(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    hooked = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(scheduler.step()))
    state = state_in(tmp_path, optimizer, module)
    assert optimizer.steps == [0]
    assert hooked == []
    assert scheduler.get_last_lr() == [0.1]
    backward(state.module, 0)
    state.step()
    assert optimizer.steps == [1]
    assert scheduler.get_last_lr() == [0.05]


@pytest.mark.parametrize("optimizer", [None, "sgd", lambda _: None, lambda _: torch.optim.SGD])
def test_what_makes_no_optimizer_is_refused(tmp_path, optimizer) -> None:
    """The argument is named, before anything is made."""
    with pytest.raises(ConfigError, match="optimizer"):
        state_in(tmp_path, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_train_is_refused(tmp_path) -> None:
    """A module whose parameters are all frozen is a mistake."""
    with pytest.raises(UnsupportedTensorError, match="there is nothing to train"):
        state_in(tmp_path, torch.optim.SGD, model().requires_grad_(False))


def test_names_that_begin_alike_are_apart(tmp_path) -> None:
    """The state of a parameter is not taken for that of another whose name goes on."""

    def twins() -> nn.Module:
        module = nn.Module()
        for name in ("a", "a/b", "a#int"):
            module.register_parameter(name, nn.Parameter(torch.ones(2)))
        return module

    first = state_in(tmp_path, torch.optim.Adam, twins())
    for p in first.parameters.values():
        p.grad = torch.ones(2)
    first.step()
    again = state_in(tmp_path, torch.optim.Adam, twins())
    assert again.resumed_from == 1
    for p in again.parameters.values():
        assert set(again.optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}


class Slashed(Listing):
    """Keeps something under a name that would be taken for a path."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["a/b"] = torch.zeros(1)


def test_a_name_that_could_not_be_told_apart_is_refused(tmp_path) -> None:
    """What would come back under another name is refused before the training."""
    with pytest.raises(UnsupportedTensorError, match="under the name 'a/b'"):
        state_in(tmp_path, Slashed)
