"""Samples elements with given sizes, without bias."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 16
_CLOSE = 1.001


def inclusion_probabilities(sizes_N: Tensor, count: float) -> Tensor:
    """Probabilities, float32 [N]: ``min(1, c * size)``, with c such that they add up to `count`.

    Sending ``x / p`` with probability p is unbiased, and these p have the least variance for their sum. Sizes of 0 get
    a probability of 0.

    Args:
        sizes_N: float32, not negative, finite.
        count: Expected number; from N on, all nonzero sizes get 1.

    References:
        Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization", 2018, arXiv
        1710.09854, algorithm 3; Wang et al., "ATOMO", 2018, arXiv 1806.04090, algorithm 1.
    """
    if count >= sizes_N.numel():
        return (sizes_N > 0).float()
    scaled = sizes_N / sizes_N.max().clamp(min=torch.finfo(torch.float32).tiny)  # sums neither overflow nor vanish
    p_N = (scaled * count / scaled.sum().clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
    for _ in range(_ROUNDS):
        certain = p_N >= 1.0
        rest = float(p_N.masked_fill(certain, 0.0).sum())
        growth = (count - int(certain.sum())) / rest if rest > 0 else 0.0
        if growth <= _CLOSE:
            break
        p_N = (p_N * growth).clamp(max=1.0)
    return p_N
