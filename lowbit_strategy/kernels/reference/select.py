"""Selection by magnitude in plain PyTorch: the definition."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from lowbit_strategy.kernels.reference.rng import GOLDEN, hash32


def select_above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Positions (int32, ascending) and values of ``|x| >= threshold``; NaN is not selected."""
    indices = (x.abs() >= threshold).nonzero().view(-1)
    return indices.to(torch.int32), x.index_select(0, indices)


def add_(x: Tensor, addend: Tensor) -> bool:
    """``x += addend``; whether all sums are finite."""
    x.add_(addend)
    return math.isfinite(float(x.sum())) or bool(x.isfinite().all())  # one fast pass where nothing is wrong


def top_k(x: Tensor, k: int) -> Tensor:
    """Positions (int64, ascending) of the k largest magnitudes; of equal ones the first; NaN before all."""
    order = x.abs().argsort(descending=True, stable=True)
    return order[:k].sort().values


def chunk_top_k(x: Tensor, kept_M: Tensor, positions_MK: Tensor, values_MK: Tensor) -> None:
    """The `kept_M` largest magnitudes of each chunk: positions ascending, of equal ones the first, NaN before all."""
    chunk = x.numel() // kept_M.numel()
    x_MC = x.view(-1, chunk)
    keys_MC = x_MC.view(torch.int32) & 0x7FFFFFFF
    room = positions_MK.shape[1]
    order_MK = keys_MC.argsort(dim=1, descending=True, stable=True)[:, :room]
    is_free_MK = torch.arange(room, device=x.device) >= kept_M[:, None]
    chosen_MK = order_MK.masked_fill(is_free_MK, chunk).sort(1).values
    chosen_MK.masked_fill_(is_free_MK, 0)
    positions_MK.copy_(chosen_MK)
    values_MK.copy_(x_MC.gather(1, chosen_MK).masked_fill(is_free_MK, 0.0))


@lru_cache(maxsize=8)  # parameters of equal size have the same in a step
def sample_positions(numel: int, num: int, seed: int, device: torch.device) -> Tensor:
    """int64 [num]: one position in each of `num` equal strata, at a place that a hash of (seed, stratum) gives.

    A plain stride would look at the same columns of a matrix again and again; a generator would need state.
    """
    edges = torch.arange(num + 1, dtype=torch.int64, device=device) * numel // max(num, 1)
    x = hash32(torch.arange(num, dtype=torch.int64, device=device) * GOLDEN + hash32(seed))
    return edges[:-1] + ((x * edges.diff()) >> 32)  # a stratum has fewer than 2**31 elements
