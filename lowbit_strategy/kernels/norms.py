"""Sums of squares."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROW = 1024  # elements that are added in float32
_SMALLEST_SQUARE = 1e-30  # mean square above which the loss of squares below 1e-38 does not matter


def squared_norm(x: Tensor) -> Tensor:
    """The sum of squares of float32 ``[N]``, as float64.

    On a CPU rows are added in float32, which is several times faster, if no square overflows and squares that underflow
    (of elements below 1e-19) do not matter.
    """
    if not x.is_cuda:
        num_rows = x.numel() // _ROW
        whole = num_rows * _ROW
        total = torch.linalg.vector_norm(x[:whole].view(num_rows, _ROW), dim=1).double().square().sum()
        if whole < x.numel():
            total += torch.linalg.vector_norm(x[whole:]).double().square()
        if _SMALLEST_SQUARE * x.numel() < float(total) < math.inf:
            return total
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()
