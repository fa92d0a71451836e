"""The weighted mean of several trainers' gradients, as the server's optimizer sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from mmrpc.train.optimizers import sparse_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from mmrpc.train.messages import Rows


class Gradient(NamedTuple):
    """What one trainer gives.

    Attributes:
        dense: By parameter; one that is missing counts as zeros.
        rows: Sparse ones, by parameter.
        weight: What they count, positive.
    """

    dense: Mapping[str, torch.Tensor]
    rows: Mapping[str, Rows]
    weight: float

    def copied(self) -> Gradient:
        """The same values in memory of its own."""
        dense = {name: tensor.clone() for name, tensor in self.dense.items()}
        rows = {name: (n.clone(), values.clone()) for name, (n, values) in self.rows.items()}
        return Gradient(dense, rows, self.weight)


class Mean:
    """Takes gradients, and gives their weighted mean to the parameters.

    The mean is in memory of its own: clipping must not change what a trainer wrote.

    Args:
        parameters: The parameters by name.
        max_norm: Norm to which the mean is clipped, over all parameters; None for no limit.

    Attributes:
        count: How many gradients were added.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], max_norm: float | None = None
    ) -> None:
        self._parameters = parameters
        self._max_norm = max_norm
        self._memory: dict[str, torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets what was added."""
        self._dense: dict[str, tuple[torch.Tensor, float]] = {}
        self._rows: dict[str, list[tuple[Rows, float]]] = {}
        self._weight = 0.0
        self.count = 0

    def add(self, gradients: Iterable[Gradient]) -> None:
        """Adds gradients; their memory is read now only, and changed never."""
        for dense, rows, weight in gradients:
            for name, gradient in dense.items():
                self._dense[name] = self._averaged(name, gradient, weight)
            for name, (numbers, values) in rows.items():
                kept = numbers.clone(), values.clone()
                self._rows.setdefault(name, []).append((kept, weight))
            self._weight += weight
            self.count += 1
        for name, (mean, weight) in self._dense.items():
            if mean is not self._memory[name]:
                self._dense[name] = self._memory[name].copy_(mean), weight

    def _averaged(
        self, name: str, gradient: torch.Tensor, weight: float
    ) -> tuple[torch.Tensor, float]:
        """The mean of those of a parameter and one more, and what they count together.

        The first of them is not copied: the second makes the mean of both in one pass.
        """
        if name not in self._memory:
            self._memory[name] = torch.empty_like(self._parameters[name].data)
        if name not in self._dense:
            return gradient, weight
        mean, before = self._dense[name]
        total = before + weight
        return torch.lerp(mean, gradient, weight / total, out=self._memory[name]), total

    def finish(self) -> None:
        """Makes the mean the parameters' gradient; those that nobody touched have none."""
        for name, p in self._parameters.items():
            p.grad = None
            if name in self._dense:
                mean, weight = self._dense[name]
                p.grad = mean if weight == self._weight else mean.mul_(weight / self._weight)
            if name in self._rows:
                given = self._rows[name]
                numbers = torch.cat([numbers for (numbers, _), _ in given])
                parts = [values.mul_(weight / self._weight) for (_, values), weight in given]
                sparse = sparse_rows(numbers, torch.cat(parts), p.shape).coalesce()
                p.grad = sparse if p.grad is None else p.grad + sparse
        if self._max_norm is not None:
            self._clip(self._max_norm)
        self.reset()

    def _clip(self, max_norm: float) -> None:
        values = self._values()
        if values:
            norm = torch.nn.utils.get_total_norm(values)
            torch._foreach_mul_(values, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    def _values(self) -> list[torch.Tensor]:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return [g._values() if g.is_sparse else g for g in gradients]
