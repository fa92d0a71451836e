"""The mean of gradients, dense and sparse, weighted and clipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmrpc.train.gradients import Gradient, Mean


@pytest.fixture
def parameters() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.zeros(3)), "table": nn.Parameter(torch.zeros(5, 2))}


def test_weighted_mean(parameters) -> None:
    """Two gradients count as their weights say."""
    mean = Mean(parameters)
    mean.add([Gradient({"a": torch.tensor([1.0, 2, 3])}, {}, 1.0)])
    mean.add([Gradient({"a": torch.tensor([5.0, 6, 7])}, {}, 3.0)])
    assert mean.count == 2
    mean.finish()
    assert parameters["a"].grad.tolist() == [4, 5, 6]
    assert parameters["table"].grad is None
    assert mean.count == 0


def test_one_gradient_is_not_changed(parameters) -> None:
    """A single gradient passes bit for bit, into memory of its own."""
    gradient = torch.randn(3)
    mean = Mean(parameters)
    mean.add([Gradient({"a": gradient}, {}, 1.0)])
    mean.finish()
    assert torch.equal(parameters["a"].grad, gradient)
    assert parameters["a"].grad.data_ptr() != gradient.data_ptr()


def test_who_has_no_gradient_counts_as_zeros(parameters) -> None:
    """The mean is over all, as in one large batch."""
    mean = Mean(parameters)
    mean.add([Gradient({"a": torch.full((3,), 4.0)}, {}, 1.0)])
    mean.add([Gradient({}, {}, 1.0)])
    mean.finish()
    assert parameters["a"].grad.tolist() == [2, 2, 2]


def test_rows_of_several_are_joined(parameters) -> None:
    """Sparse gradients stay sparse, and rows that both have are added."""
    mean = Mean(parameters)
    mean.add([Gradient({}, {"table": (torch.tensor([0, 4]), torch.ones(2, 2))}, 1.0)])
    mean.add([Gradient({}, {"table": (torch.tensor([4]), torch.full((1, 2), 3.0))}, 1.0)])
    mean.finish()
    gradient = parameters["table"].grad
    assert gradient.is_sparse
    assert gradient.indices().tolist() == [[0, 4]]
    assert gradient.values().tolist() == [[0.5, 0.5], [2, 2]]


def test_dense_and_rows_of_one_parameter(parameters) -> None:
    """A trainer that gives it dense does not keep another from giving rows."""
    mean = Mean(parameters)
    mean.add([Gradient({"table": torch.ones(5, 2)}, {}, 1.0)])
    mean.add([Gradient({}, {"table": (torch.tensor([1]), torch.full((1, 2), 3.0))}, 1.0)])
    mean.finish()
    assert parameters["table"].grad.to_dense()[:2].tolist() == [[0.5, 0.5], [2, 2]]


def test_clipping_is_torchs(parameters) -> None:
    """The norm is over dense and sparse gradients, and smaller ones are left alone."""
    dense, rows = torch.randn(3), torch.randn(2, 2)
    for max_norm in (0.1, 100.0):
        expected = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
        expected[0].grad, expected[1].grad = dense.clone(), rows.clone()
        nn.utils.clip_grad_norm_(expected, max_norm)
        mean = Mean(parameters, max_norm)
        mean.add([Gradient({"a": dense}, {"table": (torch.tensor([1, 3]), rows)}, 1.0)])
        mean.finish()
        torch.testing.assert_close(parameters["a"].grad, expected[0].grad)
        torch.testing.assert_close(parameters["table"].grad.values(), expected[1].grad)


def test_reset_forgets(parameters) -> None:
    """What was added before is in no mean."""
    mean = Mean(parameters)
    mean.add(
        [Gradient({"a": torch.ones(3)}, {"table": (torch.tensor([1]), torch.ones(1, 2))}, 1.0)]
    )
    mean.reset()
    mean.add([Gradient({"a": torch.zeros(3)}, {}, 1.0)])
    mean.finish()
    assert parameters["a"].grad.tolist() == [0, 0, 0]
    assert parameters["table"].grad is None


def test_three_at_once_and_one_by_one_are_the_same(parameters) -> None:
    """The mean does not depend on how gradients come, and theirs are not changed."""
    given = [Gradient({"a": torch.randn(3)}, {}, weight) for weight in (1.0, 2.0, 5.0)]
    kept = [gradient.dense["a"].clone() for gradient in given]
    expected = sum(g.dense["a"] * g.weight for g in given) / 8
    for parts in ([given], [given[:1], given[1:]], [[one] for one in given]):
        mean = Mean(parameters)
        for part in parts:
            mean.add(part)
        mean.finish()
        torch.testing.assert_close(parameters["a"].grad, expected)
        assert all(torch.equal(g.dense["a"], k) for g, k in zip(given, kept, strict=True))


@pytest.mark.parametrize("weight", [1e300, 1e-300])
def test_only_the_ratio_of_weights_counts(parameters, weight: float) -> None:
    """Weights that no gradient could be multiplied by are as good as others."""
    mean = Mean(parameters)
    rows = {"table": (torch.tensor([1]), torch.ones(1, 2))}
    mean.add([Gradient({"a": torch.ones(3)}, rows, weight)])
    mean.add([Gradient({"a": torch.full((3,), 3.0)}, rows, weight)])
    mean.finish()
    assert parameters["a"].grad.tolist() == [2, 2, 2]
    assert parameters["table"].grad.to_dense()[1].tolist() == [1, 1]


def test_what_was_added_does_not_follow_its_memory(parameters) -> None:
    """A trainer may use its memory again as soon as its gradient is added."""
    gradient, rows = torch.ones(3), (torch.tensor([1]), torch.ones(1, 2))
    mean = Mean(parameters)
    mean.add([Gradient({"a": gradient}, {"table": rows}, 2.0)])
    for memory in (gradient, *rows):
        memory.fill_(0)
    mean.finish()
    assert parameters["a"].grad.tolist() == [1, 1, 1]
    assert parameters["table"].grad.to_dense().sum(1).tolist() == [0, 2, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype) -> None:
    """The mean is of the parameter's kind, clipped too."""
    parameters = {"a": nn.Parameter(torch.zeros(4, dtype=dtype))}
    mean = Mean(parameters, max_norm=4.0)
    mean.add(Gradient({"a": torch.full((4,), v, dtype=dtype)}, {}, 1.0) for v in (2, 6))
    mean.finish()
    assert parameters["a"].grad.dtype is dtype
    torch.testing.assert_close(parameters["a"].grad, torch.full((4,), 2, dtype=dtype))
