"""The definition of selection by magnitude in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def select_above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Positions (int32, ascending) and values of ``|x| >= threshold``; NaN is not selected."""
    indices = (x.abs() >= threshold).nonzero().view(-1)
    return indices.to(torch.int32), x.index_select(0, indices)


def top_k(x: Tensor, k: int) -> Tensor:
    """Positions (int64, ascending) of the k largest magnitudes; of equal ones the first; NaN counts as largest."""
    order = x.abs().argsort(descending=True, stable=True)
    return order[:k].sort().values
