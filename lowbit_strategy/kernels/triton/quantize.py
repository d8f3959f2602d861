"""Device functions: elements to codes in units of their block's scale, nearest or at random."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from lowbit_strategy.kernels.reference.rng import CODE_STREAM as _CODE_STREAM
from lowbit_strategy.kernels.reference.rng import GOLDEN as _GOLDEN
from lowbit_strategy.kernels.triton.bits import HAS_PTX, bits_of

INVERSE_IS_NORMAL = tl.constexpr(0x7E800000)  # of numbers up to 2**126
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to the nearest even integer, in the low bits
ROUND_BITS = tl.constexpr(0x4B400000)
EXPONENT = tl.constexpr(0x7F800000)
# Four floats to the bytes of a register. From sm_90 on both conversions of two floats are one instruction.
INT8_PTX = tl.constexpr(
    "{ .reg .b32 a, b, c, d; "
    "cvt.rni.s32.f32 a, $1; cvt.rni.s32.f32 b, $2; cvt.rni.s32.f32 c, $3; cvt.rni.s32.f32 d, $4;"
    "cvt.pack.sat.s8.s32.b32 c, d, c, 0; cvt.pack.sat.s8.s32.b32 $0, b, a, c; }"
)
STEP_OF_2 = tl.constexpr((22 << 23) + (1 << 22))  # from the exponent of numbers below 4 to ROUND and its multiples
POWER_PTX = tl.constexpr("{ .reg .b32 a; and.b32 a, $1, 0x7F800000; add.s32 a, a, $2; max.s32 $0, a, 0x4B400000; }")
GOLDEN = tl.constexpr(_GOLDEN)
CODE_STREAM = tl.constexpr(_CODE_STREAM)


@triton.jit
def inverse(scale, MAX_SCALE_BITS: tl.constexpr):
    """1 / scale, or 0 where the scale is 0 or NaN; and bool [rows]: whether it is neither."""
    usable = scale > 0
    divisor = tl.where(usable, scale, 1.0)
    if HAS_PTX and MAX_SCALE_BITS <= INVERSE_IS_NORMAL:
        # A Newton step from within 4 units in the last place rounds like a division, for each of the 128 significands
        # of a bfloat16
        near = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [divisor], tl.float32, True, 1)
        quotient = tl.fma(tl.fma(-divisor, near, tl.full(near.shape, 1.0, tl.float32)), near, near)
    else:
        quotient = tl.div_rn(1.0, divisor)
    return tl.where(usable, quotient, 0.0), usable


@triton.jit
def quantize(h, scale, first, step, fmt: tl.constexpr, shape: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes and their values in units of the scale, as float32; and the blocks that have any, bool [rows].

    On the uniform grid the values are the integers -qmax ... qmax, and codes the same plus ROUND (of words, those of
    the first part alone); of E2M1 they are the values; otherwise they are the numbers of values, from 0.
    """
    scale_inverse, usable = inverse(scale, fmt.max_scale_bits)
    if len(fmt.codebook) > 0:
        codes, values = nearest_values(h, scale_inverse, step.zero, fmt)
    else:
        key = stream_key(step.seed, step.salt, CODE_STREAM) if STOCHASTIC else 0
        codes, values = round_parts(h, scale_inverse, first, key, fmt, shape, STOCHASTIC)
    return codes, values, usable


@triton.jit
def round_parts(
    parts,
    scale_inverse,
    first,
    key,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """The uniform grid: codes and values, as `quantize` returns them."""
    codes, values = (), ()
    for p in tl.static_range(len(parts)):
        y = scaled(parts, p, scale_inverse, first, key, fmt.qmax, fmt, shape, STOCHASTIC)
        if fmt.words and p > 0 and HAS_PTX:
            value = tl.inline_asm_elementwise("cvt.rni.f32.f32 $0, $1;", "=r,r", [y], tl.float32, True, 1)
            codes = codes + (value,)
        else:
            value = y + ROUND - ROUND
            codes = codes + ((value if fmt.words and p > 0 else y + ROUND),)
        values = values + (value,)
    return codes, values


@triton.jit
def scaled(
    parts,
    P: tl.constexpr,
    scale_inverse,
    first,
    key,
    QMAX: tl.constexpr,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Part P in units of the scale, to be rounded. Only dither can leave the range -QMAX ... QMAX."""
    y = parts[P] * scale_inverse[:, None]
    if STOCHASTIC:
        at = tl.arange(0, shape.rows)[:, None] * fmt.block + tl.arange(0, fmt.length)[None, :] + P * fmt.length
        y = add_dither(y, at.to(tl.uint32) + first.to(tl.uint32), key)
        y = tl.minimum(tl.maximum(y, -QMAX * 1.0), QMAX * 1.0)
    return y


@triton.jit
def rounded_int8(y, fmt: tl.constexpr):
    """The nearest integers, from -127 to 127; ties to even."""
    if HAS_PTX and fmt.words and cuda_capability_geq(9):  # others have no registers left
        return tl.inline_asm_elementwise(INT8_PTX, "=r,r,r,r,r", [y], tl.int8, True, 4)
    return bits_of(y + ROUND).to(tl.int8)  # the low byte


@triton.jit
def nearest_values(parts, scale_inverse, zero, fmt: tl.constexpr):
    """Codes and values of a codebook. Sums of 1 and of `steps` are exact."""
    codes, values = (), ()
    for p in tl.static_range(len(parts)):
        y = parts[p] * scale_inverse[:, None]
        code = tl.zeros_like(y)
        if fmt.e2m1:
            value = nearest_e2m1(y, zero)
            code = value
        else:
            value = tl.full(y.shape, fmt.codebook[0], tl.float32)
            for i in tl.static_range(len(fmt.thresholds)):
                above = tl.where(y > fmt.thresholds[i], 1.0, 0.0)
                code += above
                if len(fmt.steps) > 0:
                    value = tl.fma(above, tl.full(y.shape, fmt.steps[i], tl.float32), value)
                else:
                    value = tl.where(y > fmt.thresholds[i], fmt.codebook[i + 1], value)
        codes = codes + (code,)
        values = values + (value,)
    return codes, values


@triton.jit
def nearest_e2m1(y, zero):
    """The nearest 4-bit float, ties to the lower one, as given by the number of thresholds below y.

    Adding a power of two rounds to a step of 1 below 4, of 2 below 8, and of 4 above. In a tie the product, which is
    not rounded before the sum, is nearer to zero, so negative numbers are first moved one bit away from it.
    """
    bits = bits_of(y)
    bits += (bits.to(tl.uint32, bitcast=True) >> 31).to(tl.int32, bitcast=True)
    if HAS_PTX:
        power = tl.inline_asm_elementwise(POWER_PTX, "=r,r,r", [bits, zero + STEP_OF_2], tl.int32, True, 1)
    else:
        power = tl.maximum((bits & EXPONENT) + STEP_OF_2, ROUND_BITS)
    power = power.to(tl.float32, bitcast=True)
    below_one = tl.full(y.shape, 1 - 2.0**-24, tl.float32)
    return tl.fma(bits.to(tl.float32, bitcast=True), below_one, power) - power


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
