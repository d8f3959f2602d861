"""The definition of the k largest in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def top_k(x: Tensor, k: int) -> Tensor:
    """Positions (int64, ascending) of the k largest magnitudes; of equal ones the first; NaN before all."""
    order = x.abs().argsort(descending=True, stable=True)
    return order[:k].sort().values
