"""Device functions: the scale of each block, by every rule."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit_strategy.kernels.triton.bits import MAGNITUDE, bits_of

INFINITY = tl.constexpr(0x7F800000)
SMALLEST_NORMAL = tl.constexpr(0x00800000)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def block_scale(parts, left, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
    """Scale float32 [rows]: 0 where elements are too small, NaN where not finite; and whether the block is finite."""
    if fmt.rule == "absmax":
        largest = largest_bits(parts)
        raw = largest.to(tl.float32, bitcast=True) * fmt.inverse_top
        return rounded_scale(raw, largest < INFINITY, fmt.max_scale_bits)
    largest = largest_bits(parts)
    finite = largest < INFINITY  # here, not later: its first use gives scales the layout of the elements
    if fmt.rule == "rms":
        return rounded_scale(root_mean_square(parts, largest, left, fmt, shape, PLAIN), finite, fmt.max_scale_bits)
    return rounded_scale(mean_magnitude(parts, left, fmt, shape, PLAIN), finite, fmt.max_scale_bits)


@triton.jit
def residual_scale(parts, INVERSE_QMAX: tl.constexpr, MAX_SCALE_BITS: tl.constexpr):
    """Scale of a residual, which is finite: the largest saturate instead of becoming NaN."""
    bits = round_up(largest_bits(parts).to(tl.float32, bitcast=True) * INVERSE_QMAX)
    bits = tl.where(bits < SMALLEST_NORMAL, 0, tl.minimum(bits, MAX_SCALE_BITS))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_up(raw):
    """Bits of the smallest bfloat16 that is not below `raw`."""
    return (bits_of(raw) + 0xFFFF) & -0x10000


@triton.jit
def rounded_scale(raw, finite, MAX_SCALE_BITS: tl.constexpr):
    """Round up to bfloat16, flush below the smallest normal number; NaN for blocks and values that are not finite."""
    bits = round_up(raw)
    finite = finite & (bits <= MAX_SCALE_BITS)
    bits = tl.where(bits < SMALLEST_NORMAL, 0, bits)
    return tl.where(finite, bits, NAN_BITS).to(tl.float32, bitcast=True), finite


@triton.jit
def mean_of(total, left, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
    if PLAIN:
        return total * (1.0 / fmt.block)  # dividing by a power of two: the same bits
    here = left - tl.arange(0, shape.rows) * fmt.block  # elements in each block that are not padding
    return tl.div_rn(total, tl.minimum(tl.maximum(here, 1), fmt.block).to(tl.float32))


@triton.jit
def root_mean_square(parts, largest, left, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
    """Scale by a power of two near the largest magnitude, so that squares neither overflow nor vanish."""
    exponent = tl.minimum(tl.maximum((largest >> 23) - 126, -120), 120)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    squares = ()
    for p in tl.static_range(len(parts)):
        unit = parts[p] * down[:, None]
        squares = squares + (unit * unit,)
    return tl.sqrt_rn(mean_of(tree_sum(squares, fmt, shape), left, fmt, shape, PLAIN)) * up


@triton.jit
def mean_magnitude(parts, left, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
    sizes = ()
    for p in tl.static_range(len(parts)):
        sizes = sizes + (tl.abs(parts[p]),)
    return mean_of(tree_sum(sizes, fmt, shape), left, fmt, shape, PLAIN)


@triton.jit
def largest_bits(parts):
    """int32 [rows]: bits of the largest magnitude, more than those of infinity if there is a NaN."""
    if len(parts) == 1:
        return tl.max(bits_of(parts[0]) & MAGNITUDE, axis=1)
    largest = tl.abs(parts[0])
    for p in tl.static_range(1, len(parts)):
        largest = tl.maximum(largest, tl.abs(parts[p]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(bits_of(largest), axis=1)


@triton.jit
def add_halves(parts, HALF: tl.constexpr):
    sums = ()
    for p in tl.static_range(HALF):
        sums = sums + (parts[p] + parts[p + HALF],)
    return sums


@triton.jit
def tree_sum(parts, fmt: tl.constexpr, shape: tl.constexpr):
    """float32 [rows]: first half plus second half, repeatedly; the same order on every backend."""
    if len(parts) == 8:
        parts = add_halves(parts, 4)
    if len(parts) == 4:
        parts = add_halves(parts, 2)
    if len(parts) == 2:
        parts = add_halves(parts, 1)
    K: tl.constexpr = shape.rows
    total = parts[0]
    for i in tl.static_range(12):
        if (fmt.length >> i) > 1:
            total = tl.sum(tl.reshape(total, [K, 2, fmt.length >> (i + 1)]), axis=1)
    return tl.reshape(total, [K])
