"""Hadamard rotation of short rows: the public op, in one pass over memory on GPUs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_strategy.kernels import backends
from lowbit_strategy.kernels.reference.rng import dither

MAX_SIZE = 512  # longest row that one warp holds in registers
_SIGN_KEY = 0x5167


@functools.cache
def signs(size: int, device: torch.device) -> Tensor:
    """float32 [size] of 1 and -1: fixed, the same everywhere. Cached: hashing takes more launches than rotating."""
    on_host = dither(0, size, _SIGN_KEY, torch.device("cpu")).lt(0).float() * -2.0 + 1.0
    return on_host.to(device)  # this copy waits, so any stream may read the cached tensor


def rotate(x_KN: Tensor, *, inverse: bool = False) -> Tensor:
    """``H D x / sqrt(n)`` of each row, H the Hadamard matrix of n elements, D fixed random signs.

    The same bits on every device and for any number of rows.

    Args:
        x_KN: float32, contiguous; n is a power of two.
        inverse: ``D H x / sqrt(n)``.
    """
    signs_N = signs(x_KN.shape[1], x_KN.device)
    if x_KN.shape[1] <= MAX_SIZE and backends.choose(x_KN.device) == "triton":
        from lowbit_strategy.methods.zoo.kernels.triton import rotation

        return rotation.rotate(x_KN, signs_N, inverse=inverse)
    return rotate_rows(x_KN, signs_N, inverse=inverse)


def rotate_rows(x_KN: Tensor, signs_N: Tensor, *, inverse: bool) -> Tensor:
    """The definition, in plain PyTorch, bit for bit."""
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
