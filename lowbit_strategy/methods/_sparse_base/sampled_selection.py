"""The largest elements by a threshold that a sample gives."""

from __future__ import annotations

import math

from torch import Tensor

from lowbit_strategy.collectives.sparse.layout import Chosen
from lowbit_strategy.kernels.select import TINY, largest_threshold
from lowbit_strategy.kernels.sums import Sum, top_k
from lowbit_strategy.methods._sparse_base.sparse_reducer import nonzero

_SAMPLE_SHARE = 0.01
_SAMPLE_KEPT = 128  # of the sample above the threshold, if 1 % has fewer: the count is off by 9 % then
_MAX_ROUNDS = 10
_LEAST = 0.8


def select_by_sample(total: Sum, k: int, *, seed: int) -> Chosen:
    """About the k largest elements of the sum, 0.8 k to k of them, in a few passes and without sorting it.

    A threshold is taken from a sample. While it selects fewer than 0.8 k it is lowered by a fifth, at most ten times;
    if it selects more than k, the largest of those are taken. Where the sample would be a quarter of it, the
    largest are taken.
    """
    numel = total.numel()
    num = max(math.ceil(_SAMPLE_SHARE * numel), math.ceil(_SAMPLE_KEPT * numel / k))
    if 4 * num >= numel:
        return nonzero(Chosen(*top_k(total, k)))
    sample = total.sample(num, seed=seed)
    threshold = max(largest_threshold(sample, round(k / numel * num)), TINY)  # zeros are never sent
    for _ in range(1 + _MAX_ROUNDS):
        indices, values = total.above(threshold, expected=k)
        if indices.numel() >= _LEAST * k or threshold == TINY:
            break
        threshold = max(threshold * 0.8, TINY)
    return largest_of(indices, values, k)


def largest_of(indices: Tensor, values: Tensor, most: int) -> Chosen:
    """What was selected; of more than `most` the largest."""
    if indices.numel() > most:
        chosen, values = top_k(Sum(values), most)
        indices = indices.index_select(0, chosen)
    return Chosen(indices.long(), values)
