"""Public ops for selection by magnitude: thresholds, counts, exact top-k, samples.

All of them take contiguous 1-D float32. Results do not depend on the backend or the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lowbit_strategy.kernels import backends
from lowbit_strategy.kernels.native import select as native
from lowbit_strategy.kernels.reference import select as reference
from lowbit_strategy.kernels.reference.rng import sample_positions

MAX_INT32_NUMEL = 2**31 - 1
_PIECE_NUMEL = 1 << 16  # elements of a piece in plain PyTorch, which stays in a core's cache
_SAMPLE_NUMEL = 1 << 13  # smallest sample from which top_k guesses its threshold
_GROUPED_NUMEL = 1 << 21  # up to this size groups are faster than a sample
_GROUP = 32  # elements of a group, whose largest bounds the k-th largest of a small tensor
_LARGE_SAMPLE = 1 << 15  # from this size on top_k is faster than torch.topk
TINY = torch.finfo(torch.float32).tiny
_SMALLEST = 2.0**-149  # the smallest positive number


class OverflowedSum(ArithmeticError):
    """A sum of finite numbers is not finite. It has already been written."""


def check_vector(x: Tensor) -> None:
    """Raise a TypeError if `x` is not a contiguous 1-D float32 tensor."""
    if x.dtype != torch.float32 or x.ndim != 1 or not x.is_contiguous():
        raise TypeError(f"selection works on contiguous 1-D float32 tensors, got {x.dtype} of shape {tuple(x.shape)}")


def select_above(
    x: Tensor, threshold: float, *, expected: int | None = None, addend: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Positions and values of all elements with ``|x| >= threshold``, after ``x += addend`` if there is one.

    Args:
        x: float32 [N].
        threshold: NaN selects nothing.
        expected: Approximate number of selected elements; a good guess saves a second pass.
        addend: float [N]; on the CPU, float32 is added in the same pass.

    Returns:
        Positions, ascending, int32 (int64 beyond 2**31 - 1 elements), and their values, float32.

    Raises:
        OverflowedSum: A sum is not finite.
    """
    check_vector(x)
    is_long = x.numel() > MAX_INT32_NUMEL
    is_native = not is_long and backends.is_native(x.device)
    if addend is not None and not (is_native and _is_plain(x, addend)):
        x.add_(addend)
        if not (math.isfinite(float(x.sum())) or bool(x.isfinite().all())):  # one fast pass if nothing is wrong
            raise OverflowedSum
        addend = None
    if is_native:
        indices, values, finite = native.select_above(x, threshold, expected, addend)
        if not finite:
            raise OverflowedSum
        return indices, values
    if is_long:
        return _in_pieces(lambda piece: select_above(piece, threshold), x, 1 << 30, torch.int64)
    if x.device.type != "cpu" or x.numel() <= _PIECE_NUMEL:
        return reference.select_above(x, threshold)
    return _in_pieces(lambda piece: reference.select_above(piece, threshold), x, _PIECE_NUMEL, torch.int32)


def _in_pieces(
    select: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, numel: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The positions and values that `select` finds in pieces of `numel` elements."""
    found = [select(piece) for piece in x.split(numel)]
    positions = [part.to(dtype) + at * numel for at, (part, _) in enumerate(found)]
    return torch.cat(positions), torch.cat([values for _, values in found])


def sample_magnitudes(x: Tensor, num: int, *, seed: int, addend: Tensor | None = None) -> Tensor:
    """``|x|`` at `num` places spread evenly over x, chosen by a hash of the seed; all of x if `num` is at least its
    size.

    With `addend`, of the same size, ``|x + addend|`` there.
    """
    check_vector(x)
    if num >= x.numel():
        return x.abs() if addend is None else (x + addend).abs_()
    if _is_plain(x, addend) and backends.is_native(x.device):
        return native.sample_magnitudes(x, num, seed, addend)
    # index_select: on the CPU ten times faster than x[...]
    places = sample_positions(x.numel(), num, seed, x.device)
    sample = x.index_select(0, places)
    return (sample if addend is None else sample.add_(addend.index_select(0, places))).abs_()


def largest_threshold(magnitudes: Tensor, k: int) -> float:
    """The k-th largest of `magnitudes`, for k >= 1; ``>=`` this threshold selects k of them, or more with ties."""
    numel = magnitudes.numel()
    k = min(max(k, 1), numel)
    if k == 0:
        return math.inf
    if magnitudes.device.type == "cpu" and numel >= _LARGE_SAMPLE and numel >= 4 * _GROUP * k:
        return float(top_k(magnitudes, k)[1].min())
    return float(magnitudes.topk(k, sorted=False).values.min())


def top_k(x: Tensor, k: int, *, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Exactly the k elements of largest magnitude, among equal ones the first, after ``x += addend`` if there is one.

    A lower bound on the k-th largest leaves few candidates to sort; the result does not depend on the bound. Candidates
    of a sum are collected while it is formed.

    Args:
        x: float32 [N], finite.
        k: At most N.
        addend: float [N].

    Returns:
        Positions, int64, ascending, and their values, float32.

    Raises:
        OverflowedSum: A sum is not finite.
    """
    check_vector(x)
    if k > x.numel():
        raise ValueError(f"top_k: k is {k} but there are only {x.numel()} elements")
    if _is_small(x, k) and _is_plain(x, addend):
        chosen, finite = native.top_k_(x, addend, k, x.numel() // _GROUP)
        if addend is not None and not finite:
            raise OverflowedSum
        if chosen is not None:
            return chosen
        addend = None
    bound = _lower_bound(x, k, addend)
    if bound is not None:
        indices, values = select_above(x, max(bound, TINY), expected=2 * k, addend=addend)
        if indices.numel() >= k:
            return _largest(indices, values, k)
        if bound < TINY:  # all others are (nearly) 0
            return _fill_up(x, k, indices)
    elif addend is not None:
        select_above(x, math.nan, expected=0, addend=addend)
    if k == 0 or k == x.numel():
        indices = torch.arange(k, device=x.device)
        return indices, x[indices]
    return _largest(None, x, k)


def _is_small(x: Tensor, k: int) -> bool:
    """Whether one C call finds the k largest."""
    is_small = x.numel() <= _GROUPED_NUMEL and 0 < 4 * k <= x.numel() // _GROUP
    return is_small and backends.is_native(x.device)


def _is_plain(x: Tensor, addend: Tensor | None) -> bool:
    return addend is None or (addend.dtype == torch.float32 and addend.is_contiguous() and addend.shape == x.shape)


def _largest(candidates: Tensor | None, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of at least k candidates, given as positions (None: all from 0 on) and values."""
    magnitudes = values.abs()
    smallest = magnitudes.topk(k, sorted=False).values.min()
    chosen = (magnitudes >= smallest).nonzero().view(-1)
    if chosen.numel() > k:  # of elements equal to the smallest, the first ones
        ties = magnitudes.index_select(0, chosen) == smallest
        chosen = chosen[~ties | (ties.cumsum(0) <= k - chosen.numel() + ties.sum())]
    indices = chosen if candidates is None else candidates.index_select(0, chosen).long()
    return indices, values.index_select(0, chosen)


def _lower_bound(x: Tensor, k: int, addend: Tensor | None) -> float | None:
    """A magnitude that slightly more than k elements reach, hardly ever fewer; None if finding it does not pay off.

    It comes from a sample with about 64 of the largest k, so that its error is 1/8, with a margin of 50 %.
    """
    numel = x.numel()
    num = max(_SAMPLE_NUMEL, 64 * numel // max(k, 1))
    if k == 0 or 4 * num >= numel or 8 * k >= numel:
        return None
    sample = sample_magnitudes(x, num, seed=numel, addend=addend)
    return largest_threshold(sample, round(1.5 * k / numel * sample.numel()))


def _fill_up(x: Tensor, k: int, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """All candidates, plus the first of the other elements, which are 0."""
    nonzero, _ = select_above(x, _SMALLEST, expected=candidates.numel())
    if nonzero.numel() != candidates.numel():  # subnormal numbers count as well: sort everything
        chosen = reference.top_k(x, k)
        return chosen, x.index_select(0, chosen)
    is_free = torch.ones(k, dtype=torch.bool, device=x.device)
    is_free[candidates[candidates < k].long()] = False
    free = is_free.nonzero().view(-1)[: k - candidates.numel()]
    indices = torch.cat([candidates.long(), free]).sort().values
    return indices, x.index_select(0, indices)


class Sum:
    """``x + addend``, formed in x by the first pass that must read all of it.

    Memory bandwidth limits sparse methods on a CPU, so one pass adds the gradient to the residual, looks for overflow,
    and collects what reaches a threshold. The method that forms the sum raises `OverflowedSum` if it is not all finite.

    Args:
        x: float32 [N], contiguous.
        addend: float [N]; None: x already is the sum.
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
        """Sample magnitudes without forming the sum; see `sample_magnitudes`."""
        return sample_magnitudes(self._x, num, seed=seed, addend=self._addend)

    def above(self, threshold: float, *, expected: int) -> tuple[Tensor, Tensor]:
        """Select without forming the sum; see `select_above`."""
        addend, self._addend = self._addend, None
        return select_above(self._x, threshold, expected=expected, addend=addend)

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """Find the largest elements; see `top_k`."""
        addend, self._addend = self._addend, None
        return top_k(self._x, k, addend=addend)
