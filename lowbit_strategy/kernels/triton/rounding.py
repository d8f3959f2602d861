"""Device functions: scaled elements to codes, nearest or at random, on the uniform grid or a fitted codebook."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit_strategy.kernels.reference.rng import CODE_STREAM as _CODE_STREAM
from lowbit_strategy.kernels.reference.rng import GOLDEN as _GOLDEN
from lowbit_strategy.kernels.triton.scales import inverse

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to the nearest even integer, in the low bits
GOLDEN = tl.constexpr(_GOLDEN)
SIGN = tl.constexpr(-(2**31))
LARGE = tl.constexpr(2.0**127)
CODE_STREAM = tl.constexpr(_CODE_STREAM)


@triton.jit
def quantize(h, scale, first, seed, salt, table, fmt: tl.constexpr, shape: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes and what they stand for in units of the scale, as float32; and the blocks that have any, bool [rows].

    On the uniform grid both are the integers -qmax ... qmax, otherwise the numbers of values, from 0, and the values.
    """
    scale_inverse, usable = inverse(scale)
    if fmt.codebook_size > 0:
        codes, values = nearest_values(h, scale_inverse, table, fmt)
    else:
        key = stream_key(seed, salt, CODE_STREAM) if STOCHASTIC else 0
        codes = integers(round_parts(h, scale_inverse, first, key, fmt.qmax, fmt, shape, STOCHASTIC))
        values = codes
    return codes, values, usable


@triton.jit
def round_parts(
    parts,
    scale_inverse,
    first,
    key,
    QMAX: tl.constexpr,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """The uniform grid: ROUND + q, whose low bits are the integer q. Only dither can leave the range -QMAX ... QMAX."""
    rounded = ()
    for p in tl.static_range(len(parts)):
        y = parts[p] * scale_inverse[:, None]
        if STOCHASTIC:
            at = tl.arange(0, shape.rows)[:, None] * fmt.block + tl.arange(0, fmt.length)[None, :] + p * fmt.length
            y = add_dither(y, at.to(tl.uint32) + first.to(tl.uint32), key)
            y = tl.minimum(tl.maximum(y, -QMAX * 1.0), QMAX * 1.0)
        rounded = rounded + (y + ROUND,)
    return rounded


@triton.jit
def integers(rounded):
    """What `round_parts` rounded to, as float32."""
    values = ()
    for p in tl.static_range(len(rounded)):
        values = values + (rounded[p] - ROUND,)
    return values


@triton.jit
def nearest_values(parts, scale_inverse, table, fmt: tl.constexpr):
    """Fitted codebook: the numbers of its values and the values. Sums of 1 and of `steps` are exact."""
    codes, values = (), ()
    for p in tl.static_range(len(parts)):
        y = parts[p] * scale_inverse[:, None]
        code = tl.zeros_like(y)
        if fmt.e2m1:
            number = nearest_e2m1(y)
            code, value = (number + fmt.zero_code).to(tl.float32), e2m1_value(number)
        elif len(fmt.codebook) > 0:
            value = tl.full(y.shape, fmt.codebook[0], tl.float32)
            for i in tl.static_range(len(fmt.thresholds)):
                above = tl.where(y > fmt.thresholds[i], 1.0, 0.0)
                code += above
                if len(fmt.steps) > 0:
                    value = tl.fma(above, tl.full(y.shape, fmt.steps[i], tl.float32), value)
                else:
                    value = tl.where(y > fmt.thresholds[i], fmt.codebook[i + 1], value)
        else:
            for i in range(fmt.codebook_size - 1):
                code += tl.where(y > tl.load(table + i), 1.0, 0.0)
            value = tl.load(table + (fmt.codebook_size - 1) + code.to(tl.int32))
        codes = codes + (code,)
        values = values + (value,)
    return codes, values


@triton.jit
def nearest_e2m1(y):
    """The signed number of the nearest float of 4 bits. A number counts thresholds below y.

    From 2 on, numbers are y's exponent and first bit of mantissa, rounded; below, thresholds are 0.5 and 1.5.
    """
    bits = y.to(tl.int32, bitcast=True)
    sign = bits >> 31
    size = (bits & 0x7FFFFFFF) - sign
    few = (size > 0x3F000000).to(tl.int32) + (size > 0x3FC00000).to(tl.int32)
    number = tl.maximum(few, ((size + 0x1FFFFF) >> 22) - 254)
    return (number ^ sign) - sign


@triton.jit
def e2m1_value(number):
    """What it stands for: 0, 1, 2, 3, 4, 6, 8, 12 with its sign."""
    bits = (tl.abs(number) << 22) | (number & SIGN)  # a float whose smallest are below the normal range, as E2M1's are
    return bits.to(tl.float32, bitcast=True) * LARGE


@triton.jit
def hash32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stream_key(seed, salt, STREAM: tl.constexpr):
    return hash32(hash32(seed.to(tl.uint32) ^ salt.to(tl.uint32)) + STREAM)


@triton.jit
def add_dither(y, at, key):
    """Y plus a number in [-0.5, 0.5) on a grid of 2**-24, from a hash of key and place.

    The hash's upper 24 bits as a signed number: exact as float32, and so is its product with the power of two, which
    the fused form therefore rounds just as a sum with the dither would be.
    """
    x = hash32(at * GOLDEN + key)
    signed = ((x & 0xFFFFFF00) ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.float32)
    return tl.fma(signed, tl.full(y.shape, 2.0**-32, tl.float32), y)
