"""Hadamard rotation in plain PyTorch: the definition, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_KN: Tensor, signs_N: Tensor, *, inverse: bool) -> Tensor:
    return hadamard(x_KN) * signs_N if inverse else hadamard(x_KN * signs_N)


def hadamard(x_KN: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the rows, its own inverse. By butterflies: the same bits for any K."""
    size = x_KN.shape[1]
    y = x_KN
    half = 1
    while half < size:
        pairs = y.view(-1, size // (2 * half), 2, half)
        upper, lower = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack((upper + lower, upper - lower), 2)
        half *= 2
    return y.reshape(-1, size) * size**-0.5
