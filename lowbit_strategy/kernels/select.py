"""Selection by magnitude: thresholds, counts, exact top-k, samples. The public ops.

All work on float32, 1-D, contiguous; results do not depend on the backend or the number of threads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit_strategy.kernels import backends
from lowbit_strategy.kernels.reference import select as reference

MAX_INT32_NUMEL = 2**31 - 1
_CHUNK = 1 << 16  # elements of a piece of the plain PyTorch path that stays in a core's cache
_SAMPLE_NUMEL = 1 << 16  # least sample that top_k guesses its threshold from


def _check(x: Tensor) -> None:
    if x.dtype != torch.float32 or x.ndim != 1 or not x.is_contiguous():
        raise TypeError(f"selection works on contiguous 1-D float32 tensors, got {x.dtype} of shape {tuple(x.shape)}")


def select_above(x: Tensor, threshold: float, *, expected: int | None = None) -> tuple[Tensor, Tensor]:
    """Positions and values of all elements with ``|x| >= threshold``.

    Args:
        x: float32 [N].
        threshold: NaN selects nothing.
        expected: About how many there will be: a good guess saves a second pass.

    Returns:
        Positions, ascending, int32 (int64 beyond 2**31 - 1 elements), and their values, float32.
    """
    _check(x)
    if x.numel() > MAX_INT32_NUMEL:
        return _select_long(x, threshold)
    if x.device.type == "cpu" and backends.choose(x.device) == "native":
        from lowbit_strategy.kernels.native import select as native_select

        return native_select.select_above(x, threshold, expected)
    if x.device.type != "cpu":
        return reference.select_above(x, threshold)
    found = [reference.select_above(piece, threshold) for piece in x.split(_CHUNK)]
    indices = [part + at * _CHUNK for at, (part, _) in enumerate(found)]
    return torch.cat(indices), torch.cat([values for _, values in found])


def _select_long(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    found = [select_above(piece, threshold) for piece in x.split(1 << 30)]
    indices = [part.long() + (at << 30) for at, (part, _) in enumerate(found)]
    return torch.cat(indices), torch.cat([values for _, values in found])


def count_above(x: Tensor, threshold: float) -> int:
    """How many elements have ``|x| >= threshold``."""
    _check(x)
    if x.device.type == "cpu" and backends.choose(x.device) == "native":
        from lowbit_strategy.kernels.native import select as native_select

        return native_select.count_above(x, threshold)
    chunk = _CHUNK if x.device.type == "cpu" else 1 << 30
    return sum(reference.count_above(piece, threshold) for piece in x.split(chunk))


def sample_magnitudes(x: Tensor, num: int, *, seed: int) -> Tensor:
    """``|x|`` at `num` places spread evenly over x, chosen by a hash of the seed; all of x if `num` is not less."""
    _check(x)
    if num >= x.numel():
        return x.abs()
    # index_select: on the CPU ten times faster than x[...]
    return x.index_select(0, reference.sample_positions(x.numel(), num, seed, x.device)).abs_()


def largest_threshold(magnitudes: Tensor, k: int) -> float:
    """The k-th largest of `magnitudes` (at least one is wanted): ``>=`` it selects k of them, more on ties."""
    k = min(max(k, 1), magnitudes.numel())
    if k == 0:
        return math.inf
    return float(magnitudes.topk(k, sorted=False).values.min())


def sampled_threshold(x: Tensor, density: float, num: int, *, seed: int) -> float:
    """A magnitude that about ``density * N`` elements of x reach, estimated from `num` of them."""
    sample = sample_magnitudes(x, num, seed=seed)
    return largest_threshold(sample, round(density * sample.numel()))


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Exactly the k elements of largest magnitude; of equal ones the first.

    A threshold from a sample leaves few candidates, and only those are sorted; the result does not depend on it.

    Args:
        x: float32 [N], finite.
        k: At most N.

    Returns:
        Positions, int64, ascending, and their values, float32.
    """
    _check(x)
    if k > x.numel():
        raise ValueError(f"top_k: k is {k} but there are only {x.numel()} elements")
    if k == 0 or k == x.numel():
        indices = torch.arange(k, device=x.device)
        return indices, x[indices]
    candidates, values = _candidates(x, k)
    magnitudes = values.abs()
    smallest = magnitudes.topk(k, sorted=False).values.min()
    above = (magnitudes > smallest).nonzero().view(-1)
    ties = (magnitudes == smallest).nonzero().view(-1)[: k - above.numel()]
    chosen = torch.cat([above, ties]).sort().values
    return candidates.index_select(0, chosen).long(), values.index_select(0, chosen)


def _candidates(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """All elements at or above some magnitude that at least k reach."""
    num = max(_SAMPLE_NUMEL, 64 * x.numel() // k)  # some 64 of the largest k in the sample: its error is 1/8
    if 4 * num < x.numel() and 8 * k < x.numel():
        threshold = sampled_threshold(x, 1.5 * k / x.numel(), num, seed=x.numel())
        if threshold > 0:
            indices, values = select_above(x, threshold, expected=2 * k)
            if indices.numel() >= k:
                return indices, values
    return torch.arange(x.numel(), device=x.device), x
