"""Samples of tensors: the same elements on all ranks, spread evenly, in step with no dimension; and exact squares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.kernels.reference.rng import dither


class Sample(NamedTuple):
    """Which elements of a flat tensor are sampled, in order, and how many elements each of them stands for.

    Args:
        positions_N: int64.
        weights_N: float64; their sum is the tensor's number of elements.
    """

    positions_N: Tensor
    weights_N: Tensor


def spread_sample(numel: int, num_samples: int, seed: int, device: torch.device) -> Sample:
    """One element of each of `num_samples` consecutive parts of about equal length, at a hashed place in its part.

    A stride would do, were it not that tensors have rows: one that divides a row's length picks columns. Here every
    element is picked with the reciprocal of its weight as its probability, regardless of the shape.

    Args:
        numel: Elements of the tensor.
        num_samples: How many are picked at most; all elements if the tensor has no more.
        seed: The same on all ranks.
        device: Of the result.
    """
    count = min(numel, num_samples)
    edges = torch.arange(count + 1, dtype=torch.int64, device=device) * numel // max(count, 1)
    lengths = edges.diff()
    share = dither(0, count, seed, device).double() + 0.5  # in [0, 1), on a grid of 2**-24
    fine = dither(count, count, seed, device).double() + 0.5  # below that grid, where parts are longer
    within = ((share + fine * 2.0**-24) * lengths).long().minimum(lengths - 1)
    return Sample(edges[:-1] + within, lengths.double())


def squared_norm(x: Tensor) -> Tensor:
    """float64: the sum of squares. In float32 those of elements below 1e-19 would vanish."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()
