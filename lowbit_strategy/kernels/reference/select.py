"""Selection by magnitude in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.kernels.reference.rng import GOLDEN, hash32

_MASK = 0xFFFFFFFF


def select_above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Positions (int32, ascending) and values of ``|x| >= threshold``; NaN is not selected."""
    indices = (x.abs() >= threshold).nonzero().view(-1)
    return indices.to(torch.int32), x.index_select(0, indices)


def count_above(x: Tensor, threshold: float) -> int:
    return int((x.abs() >= threshold).sum())


def top_k(x: Tensor, k: int) -> Tensor:
    """Positions (int64, ascending) of the k largest magnitudes; of equal ones the first; NaN before all."""
    order = x.abs().argsort(descending=True, stable=True)
    return order[:k].sort().values


def sample_positions(numel: int, num: int, seed: int, device: torch.device) -> Tensor:
    """int64 [num]: one position in each of `num` equal strata, at a place that a hash of (seed, stratum) gives.

    A plain stride would look at the same columns of a matrix again and again; a generator would need state.
    """
    edges = torch.arange(num + 1, dtype=torch.int64, device=device) * numel // max(num, 1)
    x = (torch.arange(num, dtype=torch.int64, device=device) * GOLDEN + hash32(seed)) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    x = x ^ (x >> 16)
    return edges[:-1] + ((x * edges.diff()) >> 32)  # a stratum has fewer than 2**31 elements
