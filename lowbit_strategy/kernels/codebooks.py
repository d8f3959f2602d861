"""Codebooks for Gaussian values, as block formats: the Lloyd-Max codebook, and an unbiased one."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

from lowbit_strategy.kernels.format import MAX_CODEBOOK, BlockFormat

_SIGNIFICANT_BITS = 16  # so that value * scale is exact in float32
_CONVERGED = 1e-12


@functools.cache
def gaussian_codebook(codebook_size: int) -> tuple[float, ...]:
    """The Lloyd-Max quantizer of a unit Gaussian, which has the least mean squared error.

    1. thresholds are halfway between neighboring values
    2. each value is the mean of the Gaussian between its thresholds, ``(pdf(a) - pdf(b)) / (cdf(b) - cdf(a))``
    3. repeat until nothing moves; round to 16 significant bits

    ``gaussian_codebook(2)`` is +-sqrt(2 / pi) = +-0.798, ``gaussian_codebook(4)`` +-0.4528 and +-1.510.
    """
    if not 2 <= codebook_size <= MAX_CODEBOOK:
        raise ValueError(
            f"codebook_size must be from 2 to {MAX_CODEBOOK}, got {codebook_size}: above that, even spacing is as good"
        )
    codebook = [4.0 * (i + 0.5) / codebook_size - 2.0 for i in range(codebook_size)]
    moved = math.inf
    while moved > _CONVERGED:
        edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(codebook)), math.inf]
        fitted = [(_pdf(a) - _pdf(b)) / (_cdf(b) - _cdf(a)) for a, b in pairwise(edges)]  # means between edges
        moved = max(abs(new - old) for new, old in zip(fitted, codebook, strict=True))
        codebook = fitted
    half = [_round(value) for value in codebook[codebook_size - codebook_size // 2 :]]
    middle = [0.0] if codebook_size % 2 else []
    return (*(-value for value in reversed(half)), *middle, *half)


def _pdf(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _round(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, _SIGNIFICANT_BITS)), exponent - _SIGNIFICANT_BITS)


def sent_share(codebook_size: int) -> float:
    """``E[x Q(x)] / E[x**2]`` of `gaussian_codebook` on its Gaussian, which is also ``E[Q(x)**2]``: 0.637 for two
    values, 0.810 for three, 0.882 for four. Each value is a mean, so coding shrinks values.
    """
    codebook = gaussian_codebook(codebook_size)
    edges = (-math.inf, *_thresholds(codebook), math.inf)
    return sum(value * (_pdf(a) - _pdf(b)) for value, (a, b) in zip(codebook, pairwise(edges), strict=True))


def _thresholds(codebook: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(_round((a + b) / 2) for a, b in pairwise(codebook))


def lloyd_max(bits: int, block_size: int) -> BlockFormat:
    """The Lloyd-Max quantizer of a Gaussian with 2**bits values, in units of the block's root mean square."""
    return BlockFormat(bits=bits, block_size=block_size, scale_rule="rms", codebook=gaussian_codebook(2**bits))


@functools.cache
def unbiased_lloyd_max(codebook_size: int, block_size: int) -> BlockFormat:
    """Values with ``E[x Q(x)] = E[x**2]``, in units of the block's root mean square.

    On average a whole Gaussian gradient arrives, with more noise; more exactly 1.004 to 1.010 of it arrives, because
    scales are rounded up to bfloat16. The values are the Lloyd-Max values divided by `sent_share`, with the same
    thresholds; no other unbiased values have less error. Two values: +-1.2533; three: 0 and +-1.5114 with thresholds
    +-0.612; four: +-0.5131 and +-1.7115 with thresholds 0 and +-0.9816.
    """
    codebook, factor = gaussian_codebook(codebook_size), 1.0 / sent_share(codebook_size)
    return BlockFormat(
        bits=(codebook_size - 1).bit_length(),
        block_size=block_size,
        scale_rule="rms",
        codebook=tuple(_round(value * factor) for value in codebook),
        thresholds=_thresholds(codebook),
    )
