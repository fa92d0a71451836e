"""A module's tensors by name, and their move to other memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mmrpc.errors import ConfigError, LayoutError, MmrpcError, UnsupportedTensorError
from mmrpc.train import attach, registry


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True)
        self.bag = nn.EmbeddingBag(5, 2)
        self.norm = nn.BatchNorm1d(2)
        self.tied = self.table
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_names() -> None:
    """What is trained, kept, sparse, shared or not persistent is told apart."""
    module = Model()
    assert set(attach.trained(module)) == {
        "table.weight",
        "bag.weight",
        "norm.weight",
        "norm.bias",
    }
    assert set(attach.buffers_of(module)) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert attach.sparse_names(module) == {"table.weight"}
    assert set(attach.tensors_of(module)) == {
        *attach.trained(module),
        *attach.buffers_of(module),
        "frozen",
    }


def test_pointing_keeps_the_parameters() -> None:
    """Optimizers and hooks keep their parameters; values and memory are the new ones."""
    module = Model()
    before = dict(module.named_parameters())
    new = {name: tensor.detach() + 1 for name, tensor in attach.tensors_of(module).items()}
    attach.point(module, new)
    for name, p in module.named_parameters():
        assert p is before[name]
        assert p.data_ptr() == new[name].data_ptr()
    assert module.tied.weight.data_ptr() == new["table.weight"].data_ptr()
    assert module.norm.running_mean.data_ptr() == new["norm.running_mean"].data_ptr()
    attach.point(module, {})
    assert module.frozen.data_ptr() == new["frozen"].data_ptr()


def test_a_graph_keeps_the_old_values() -> None:
    """A forward before the move gives gradients for the values that it used."""
    module = nn.Linear(2, 1, bias=False)
    expected = module.weight.detach().clone()
    x = torch.ones(1, 2, requires_grad=True)
    out = module(x)
    attach.point(module, {"weight": torch.full((1, 2), 9.0)})
    out.sum().backward()
    assert torch.equal(x.grad, expected)


def test_differences_are_named() -> None:
    """A module of other sizes is refused with what differs first."""
    specs = attach.specs_of(nn.Linear(2, 3))
    attach.check_same(specs, attach.specs_of(copy.deepcopy(nn.Linear(2, 3))), "it")
    with pytest.raises(LayoutError, match=r"^it has 'weight' as float32\[4, 2\] instead of"):
        attach.check_same(specs, attach.specs_of(nn.Linear(2, 4)), "it")


class Fake:
    """Stands for a coordinator."""

    def pull(self, x: int) -> int:
        return 2 * x


def test_calls_find_their_server() -> None:
    """A call goes to the server of its name, and says so where there is none."""
    server = Fake()
    registry.serve("here", server)
    try:
        assert registry.call("here", "pull", (4,)) == 8
        with pytest.raises(MmrpcError, match="has a parameter server 'here' already"):
            registry.serve("here", Fake())
        registry.withdraw("here", Fake())
        assert registry.call("here", "pull", (5,)) == 10
    finally:
        registry.withdraw("here", server)
    with pytest.raises(MmrpcError, match="no parameter server 'here'"):
        registry.call("here", "pull", (4,))


def test_calls_reach_nothing_else() -> None:
    """What a peer may call of a server is a short list."""
    server = Fake()
    registry.serve("here", server)
    try:
        with pytest.raises(MmrpcError, match="no method '__class__' for trainers"):
            registry.call("here", "__class__", ())
    finally:
        registry.withdraw("here", server)


class Odd(nn.Module):
    """A module with tensors of any kind and name."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def overlapping() -> Odd:
    memory = torch.ones(6)
    return Odd(a=nn.Parameter(memory[:4]), b=nn.Parameter(memory[3:]))


def buffer_of_a_parameter() -> Odd:
    p = nn.Parameter(torch.ones(4))
    return Odd(a=p, b=p.detach())


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Odd(a=nn.Parameter(torch.eye(3).to_sparse())), "'a' is a tensor of torch.sparse"),
        (lambda: Odd(a=torch.ones(3, device="meta")), "'a' is a tensor of meta"),
        (lambda: nn.LazyLinear(3), "'weight' has no shape yet. Run the module once"),
        (lambda: Odd(**{"optim/x": nn.Parameter(torch.ones(3))}), "Give it another name"),
        (overlapping, "'a' and 'b' share memory and are not the same parameter"),
        (buffer_of_a_parameter, "'a' and 'b' share memory"),
    ],
)
def test_tensors_that_cannot_be_mapped_are_refused(make, problem: str) -> None:
    """What would change its meaning in mapped memory is refused, and the tensor is named."""
    with pytest.raises(UnsupportedTensorError, match=problem):
        attach.specs_of(make())


def test_pieces_of_one_memory_are_fine() -> None:
    """Parameters may lie side by side, and a tied one is there once."""
    memory = torch.ones(6)
    module = Odd(a=nn.Parameter(memory[:3]), b=nn.Parameter(memory[3:]))
    module.c = module.a
    assert list(attach.specs_of(module)) == ["a", "b"]


@pytest.mark.parametrize("module", [None, "x", nn.Linear, torch.ones(2)])
def test_no_module(module) -> None:
    """What is no module is refused before anything is looked for in it."""
    with pytest.raises(ConfigError, match=r"module: it must be an instance of torch.nn"):
        attach.specs_of(module)
