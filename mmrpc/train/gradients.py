"""The weighted mean of several trainers' gradients, as the server's optimizer sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mmrpc.train.optimizers import sparse_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from mmrpc.train.messages import Rows


class Mean:
    """Sums gradients, and gives their weighted mean to the parameters.

    The sums are in memory of its own: clipping must not change what a trainer wrote.

    Args:
        parameters: The parameters by name.
        max_norm: Norm to which the mean is clipped, over all parameters; None for no limit.
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
        self._dense: dict[str, torch.Tensor] = {}
        self._rows: dict[str, list[Rows]] = {}
        self._weight = 0.0
        self.count = 0

    def add(
        self, dense: Mapping[str, torch.Tensor], rows: Mapping[str, Rows], weight: float
    ) -> None:
        """Adds the gradients of one trainer.

        Args:
            dense: By parameter; one that is missing counts as zeros.
            rows: Sparse ones, by parameter.
            weight: What they count.
        """
        for name, gradient in dense.items():
            total = self._dense.get(name)
            if total is None:
                total = self._memory.setdefault(name, torch.empty_like(self._parameters[name].data))
                torch.mul(gradient, weight, out=total)
                self._dense[name] = total
            else:
                total.add_(gradient, alpha=weight)
        for name, (numbers, values) in rows.items():
            # A copy: the trainer may use its memory again once it has an answer.
            self._rows.setdefault(name, []).append((numbers.clone(), values * weight))
        self._weight += weight
        self.count += 1

    def finish(self) -> None:
        """Makes the mean the parameters' gradient; those that nobody touched have none."""
        for name, p in self._parameters.items():
            p.grad = None
            if name in self._dense:
                p.grad = self._dense[name]
            if name in self._rows:
                numbers = torch.cat([numbers for numbers, _ in self._rows[name]])
                rows = torch.cat([rows for _, rows in self._rows[name]])
                sparse = sparse_rows(numbers, rows, p.shape).coalesce()
                p.grad = sparse if p.grad is None else p.grad + sparse
        values = self._values()
        if values and self._weight != 1.0:
            torch._foreach_div_(values, self._weight)
        if values and self._max_norm is not None:
            norm = torch.nn.utils.get_total_norm(values)
            torch._foreach_mul_(values, (self._max_norm / (norm + 1e-6)).clamp(max=1.0))
        self.reset()

    def _values(self) -> list[torch.Tensor]:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return [g._values() if g.is_sparse else g for g in gradients]
