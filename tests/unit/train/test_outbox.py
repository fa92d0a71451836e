"""What a trainer gives: whole, whatever a training loop did to the gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmrpc.errors import LayoutError
from mmrpc.train import attach
from mmrpc.train.outbox import Outbox
from mmrpc.train.slot import Slot

X = torch.tensor([[1.0, 2.0], [3.0, 5.0]])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def slot_for(module: nn.Module) -> Slot:
    specs = attach.specs_of(module)
    return Slot.create(
        {name: specs[name] for name in attach.trained(module)},
        {name: specs[name] for name in attach.buffers_of(module)},
    )


def backward(module: nn.Module) -> dict[str, torch.Tensor]:
    """Makes gradients, and gives what they have to be."""
    other = model()
    other(X).square().sum().backward()
    module(X).square().sum().backward()
    return {name: p.grad for name, p in other.named_parameters()}


def assert_gives(given, expected) -> None:
    assert given.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(given[name], gradient)


def test_backward_writes_into_the_slot() -> None:
    """Gradients and running statistics are in the memory that the server reads."""
    module = model()
    slot = slot_for(module)
    outbox = Outbox(module, slot, ())
    outbox.begin(1)
    expected = backward(module)
    assert outbox.is_touched
    contents = outbox.complete(1)
    assert slot.holds(1)
    assert contents == (frozenset(), {}, None, None)
    assert_gives(slot.gradients, expected)
    assert slot.buffers["1.num_batches_tracked"] == 1
    outbox.begin(2)
    assert not slot.holds(1)
    assert not any(gradient.any() for gradient in slot.gradients.values())


@pytest.mark.parametrize("with_slot", [True, False])
def test_gradients_from_elsewhere_are_taken_too(with_slot: bool) -> None:
    """Set to None, replaced, or never made by backward: what is there at the end counts."""
    module = model()
    slot = slot_for(module) if with_slot else None
    outbox = Outbox(module, slot, ())
    outbox.begin(1)
    module.zero_grad(set_to_none=True)
    module[0].weight.grad = torch.full((2, 2), 3.0)
    contents = outbox.complete(1)
    assert contents.untouched == {"0.bias", "1.weight", "1.bias"}
    given = slot.gradients if slot is not None else contents.dense
    assert given["0.weight"].unique().tolist() == [3]


def test_without_a_slot_all_is_sent() -> None:
    """The tensors themselves are in the push."""
    module = model()
    outbox = Outbox(module, None, ())
    outbox.begin(1)
    expected = backward(module)
    contents = outbox.complete(1)
    assert_gives(contents.dense, expected)
    assert contents.buffers["1.num_batches_tracked"] == 1


def replace(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(torch.ones(2, 2))


def move(module: nn.Module) -> None:
    module[0].weight.data = torch.ones(2, 2)


def freeze(module: nn.Module) -> None:
    module[0].bias.requires_grad_(False)


def add(module: nn.Module) -> None:
    module[0].extra = nn.Parameter(torch.ones(2))


def drop_buffer(module: nn.Module) -> None:
    module[1].running_mean = None


def shrink_buffer(module: nn.Module) -> None:
    module[1].running_mean = torch.ones(1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (replace, "its parameter '0.weight' was replaced, removed or frozen"),
        (move, "its parameter '0.weight' was moved to other memory"),
        (lambda module: module.double(), "its parameter '0.weight' was moved"),
        (freeze, "its parameter '0.bias' was replaced, removed or frozen"),
        (add, "its parameter '0.extra' has come, or requires gradients"),
        (drop_buffer, r"its buffer '1.running_mean' is no longer float32\[2\]"),
        (shrink_buffer, r"its buffer '1.running_mean' is no longer float32\[2\]"),
    ],
)
def test_a_module_that_was_changed_is_refused(change, problem: str) -> None:
    """What would silently not be trained is an error that names it."""
    module = model()
    outbox = Outbox(module, slot_for(module), ())
    outbox.check_module()
    change(module)
    with pytest.raises(LayoutError, match=f"since the module has joined, {problem}"):
        outbox.check_module()


def test_what_changes_nothing_is_fine() -> None:
    """Modes, values and hooks are the training loop's own business."""
    module = model()
    outbox = Outbox(module, slot_for(module), ())
    module.eval()
    module.load_state_dict(model().state_dict())
    module[0].register_forward_hook(lambda *_: None)
    outbox.check_module()


def test_a_stopped_outbox_notices_nothing() -> None:
    """Its module is a module like any other, with gradients of its own."""
    module = model()
    slot = slot_for(module)
    outbox = Outbox(module, slot, ())
    outbox.begin(1)
    outbox.stop()
    backward(module)
    assert not outbox.is_touched
    assert not slot.gradients["0.weight"].any()
