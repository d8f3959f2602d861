"""The definition of selection by a threshold in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def select_above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Positions (int32, ascending) and values of ``|x| >= threshold``; NaN is not selected."""
    indices = (x.abs() >= threshold).nonzero().view(-1)
    return indices.to(torch.int32), x.index_select(0, indices)
