"""Reconstruction levels fitted to a Gaussian, for block formats whose scale is the root mean square."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

from lowbit_strategy.kernels.format import BlockFormat

_SIGNIFICANT_BITS = 16  # so that level * scale is exact in float32
_CONVERGED = 1e-12
MAX_LEVELS = 32


@functools.cache
def gaussian_levels(num_levels: int) -> tuple[float, ...]:
    """Lloyd-Max quantiser of a unit Gaussian: the levels with the least mean squared error.

    1. thresholds are halfway between neighbouring levels
    2. each level is the mean of the Gaussian between its thresholds, ``(pdf(a) - pdf(b)) / (cdf(b) - cdf(a))``
    3. repeat until nothing moves; round to 16 significant bits

    ``gaussian_levels(2)`` is +-sqrt(2 / pi) = +-0.798, ``gaussian_levels(4)`` +-0.4528 and +-1.510.
    """
    if not 2 <= num_levels <= MAX_LEVELS:
        raise ValueError(
            f"num_levels must be from 2 to {MAX_LEVELS}, got {num_levels}: with more, even levels do as well"
        )
    levels = [4.0 * (i + 0.5) / num_levels - 2.0 for i in range(num_levels)]
    moved = math.inf
    while moved > _CONVERGED:
        edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        fitted = [_mean_between(a, b) for a, b in pairwise(edges)]
        moved = max(abs(new - old) for new, old in zip(fitted, levels, strict=True))
        levels = fitted
    half = [_round(level) for level in levels[num_levels - num_levels // 2 :]]
    middle = [0.0] if num_levels % 2 else []
    return (*(-level for level in reversed(half)), *middle, *half)


def _mean_between(a: float, b: float) -> float:
    return (_pdf(a) - _pdf(b)) / (_cdf(b) - _cdf(a))


def _pdf(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _round(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, _SIGNIFICANT_BITS)), exponent - _SIGNIFICANT_BITS)


def fitted(bits: int, block_size: int) -> BlockFormat:
    """2**bits levels fitted to a Gaussian, in units of the block's root mean square."""
    return BlockFormat(bits=bits, block_size=block_size, scale_rule="rms", levels=gaussian_levels(2**bits))


def ternary(block_size: int) -> BlockFormat:
    """-1, 0, 1 in units of the mean magnitude of what exceeds 0.7 of the mean magnitude; five trits to a byte."""
    return BlockFormat(bits=2, block_size=block_size, scale_rule="ternary", levels=(-1.0, 0.0, 1.0))
