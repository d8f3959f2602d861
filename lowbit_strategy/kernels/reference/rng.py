"""Counter-based random numbers with the same bits in PyTorch, C and Triton, without state or a global generator.

The mixer is the public-domain 32-bit "lowbias32" finalizer (C. Wellons, 2018).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
CODE_STREAM, RESIDUAL_STREAM = 0, 1
_Number = TypeVar("_Number", int, Tensor)


def hash32(x: _Number) -> _Number:
    """32 bits of an integer, or of each of an int64 tensor."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def stream_key(seed: int, salt: _Number, stream: int) -> _Number:
    """32-bit key of one segment's stream: every call has a seed, every segment a salt, every use a stream."""
    return hash32(hash32(salt ^ seed) + stream)


def dither(first: int, numel: int, key: int, device: torch.device) -> Tensor:
    """float32 [numel], uniform in [-0.5, 0.5) on a grid of 2**-24: a hash of (key, first + i) modulo 2**32."""
    return dither_at(torch.arange(first, first + numel, dtype=torch.int64, device=device), key)


def dither_at(index: Tensor, key: Tensor | int) -> Tensor:
    """`dither` at any elements: int64 indices and keys that broadcast."""
    return (hash32(index * GOLDEN + key) >> 8).to(torch.float32) * 2.0**-24 - 0.5


@lru_cache(maxsize=8)  # parameters of equal size share them in a step
def sample_positions(numel: int, num: int, seed: int, device: torch.device) -> Tensor:
    """int64 [num]: one position in each of `num` equal strata, at a place that a hash of (seed, stratum) gives.

    A plain stride would always look at the same columns of a matrix; a generator would need state.
    """
    return positions_in(*strata(numel, num, device), seed)


def strata(numel: int, num: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [num]: where each of `num` equal strata begins, and how many elements it has."""
    edges = torch.arange(num + 1, dtype=torch.int64, device=device) * numel // max(num, 1)
    return edges[:-1], edges.diff()


def positions_in(starts: Tensor, lengths: Tensor, seed: int) -> Tensor:
    """`sample_positions` in these strata."""
    x = hash32(torch.arange(len(starts), dtype=torch.int64, device=starts.device) * GOLDEN + hash32(seed))
    return starts + ((x * lengths) >> 32)  # a stratum has fewer than 2**31 elements
