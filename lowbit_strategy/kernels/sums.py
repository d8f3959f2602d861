"""A sum of two tensors that is formed by the first pass that has to read all of it, and selection from it.

Memory is the limit of sparse methods on a CPU: adding the gradient to the residual, looking for overflow and collecting
what reaches a threshold are one pass over both.
"""

from __future__ import annotations

import math

from torch import Tensor

from lowbit_strategy.kernels import select
from lowbit_strategy.kernels.select import OverflowedSum

__all__ = ["OverflowedSum", "Sum", "top_k"]


class Sum:
    """``x + addend``, which ends up in x. What forms it raises `OverflowedSum` if not all of it is finite.

    Args:
        x: float32 [N], contiguous.
        addend: float [N], or None: x is the sum already.
    """

    def __init__(self, x: Tensor, addend: Tensor | None = None) -> None:
        self._x, self._addend = x, addend

    def numel(self) -> int:
        return self._x.numel()

    def formed(self) -> Tensor:
        if self._addend is not None:
            self.above(math.nan, expected=0)
        return self._x

    def sample(self, num: int, *, seed: int) -> Tensor:
        """As `select.sample_magnitudes`; forms nothing."""
        return select.sample_magnitudes(self._x, num, seed=seed, addend=self._addend)

    def above(self, threshold: float, *, expected: int) -> tuple[Tensor, Tensor]:
        """As `select.select_above`."""
        return select.select_above(self._x, threshold, expected=expected, addend=self._taken_addend())

    def _taken_addend(self) -> Tensor | None:
        addend, self._addend = self._addend, None
        return addend


def top_k(total: Sum, k: int) -> tuple[Tensor, Tensor]:
    """As `select.top_k`."""
    return select.top_k(total._x, k, addend=total._taken_addend())
