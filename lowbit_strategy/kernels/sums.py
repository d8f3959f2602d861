"""A sum of two tensors that is formed by the first pass that has to read all of it, and selection from it.

Memory is the limit of sparse methods on a CPU: adding the gradient to the residual, looking for overflow and collecting
what reaches a threshold are one pass over both.
"""

from __future__ import annotations

import math

from torch import Tensor

from lowbit_strategy.kernels import select


class OverflowedSum(ArithmeticError):
    """Finite numbers have a sum that is not; it has been written."""


class Sum:
    """``x + addend``, which ends up in x.

    Args:
        x: float32 [N], contiguous.
        addend: float [N], or None: x is the sum already.
    """

    def __init__(self, x: Tensor, addend: Tensor | None = None) -> None:
        self._x, self._addend = x, addend

    def numel(self) -> int:
        return self._x.numel()

    def formed(self) -> Tensor:
        """The sum.

        Raises:
            OverflowedSum: Not all of it is finite.
        """
        if self._addend is not None:
            self._add_(math.nan, 0)
        return self._x

    def sample(self, num: int, *, seed: int) -> Tensor:
        """As `select.sample_magnitudes`; forms nothing."""
        return select.sample_magnitudes(self._x, num, seed=seed, addend=self._addend)

    def above(self, threshold: float, *, expected: int) -> tuple[Tensor, Tensor]:
        """As `select.select_above`.

        Raises:
            OverflowedSum: Not all of the sum is finite.
        """
        if self._addend is None:
            return select.select_above(self._x, threshold, expected=expected)
        return self._add_(threshold, expected)

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """As `select.top_k`.

        Raises:
            OverflowedSum: Not all of the sum is finite.
        """
        addend, self._addend = self._addend, None
        chosen = select.top_k(self._x, k) if addend is None else select.add_top_k_(self._x, addend, k)
        if chosen is None:
            raise OverflowedSum
        return chosen

    def _add_(self, threshold: float, expected: int) -> tuple[Tensor, Tensor]:
        addend, self._addend = self._addend, None
        assert addend is not None
        indices, values, finite = select.add_select_(self._x, addend, threshold, expected=expected)
        if not finite:
            raise OverflowedSum
        return indices, values


def top_k(total: Sum, k: int) -> tuple[Tensor, Tensor]:
    """As `select.top_k` of the sum: what reaches a sampled lower bound is collected while the sum is formed.

    Raises:
        OverflowedSum: Not all of the sum is finite.
    """
    numel = total.numel()
    if (num := select.bound_sample_numel(numel, k)) is not None:
        bound = select.sampled_bound(total.sample(num, seed=numel), numel, k)
        candidates, values = total.above(max(bound, select.TINY), expected=2 * k)
        if candidates.numel() >= k:
            return select.largest(candidates, values, k)
    return total.top_k(k)
