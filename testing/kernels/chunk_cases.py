"""Chunks that selection must get right: ties, zeros, numbers below the normal range, inf and NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chunk_cases() -> list[tuple[str, Tensor, Tensor, int]]:
    """Name, elements, how many of each chunk are kept, room."""
    x = torch.randn(7 * 4096, generator=torch.Generator().manual_seed(0))
    x[5000], x[5001], x[6000] = math.nan, math.inf, -math.nan
    x[2 * 4096 : 3 * 4096] = 0.0
    x[3 * 4096 : 4 * 4096].round_()
    x[4 * 4096 : 5 * 4096] *= 1e-42
    cases = []
    for kept in (1, 4, 41, 1000, 4096):
        kept_M = torch.tensor([kept, kept, kept, kept, kept, 0, max(1, kept // 2)], dtype=torch.int32)
        cases.append((f"{kept} of each", x, kept_M, kept))
    return cases
