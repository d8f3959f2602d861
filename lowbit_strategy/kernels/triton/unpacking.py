"""Device functions: a source's packed codes to what they stand for, times the scale."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit_strategy.kernels.triton.device_functions import add_product, offsets
from lowbit_strategy.kernels.triton.packing import load_rows
from lowbit_strategy.kernels.triton.rounding import e2m1_value

BYTE = tl.constexpr(8388608.0)  # 2**23: a byte or'ed into its mantissa is that number
BYTE_BITS = tl.constexpr(0x4B000000)


@triton.jit
def load_bytes(pointer, rows, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
    """The packed codes of the tile's blocks as a tuple of uint8 tensors, in the order of the planes."""
    packed = ()
    if fmt.ternary:
        byte = tl.arange(0, fmt.block)[None, :] % fmt.code_nbytes
        at = tl.arange(0, shape.rows)[:, None] * fmt.code_nbytes + byte
        packed = packed + (load_rows(pointer + at, rows[:, None], PLAIN),)
    else:
        for i in tl.static_range(len(fmt.planes)):
            packed = packed + load_plane(pointer, rows, i, fmt, shape, PLAIN)
    return packed


@triton.jit
def load_plane(pointer, rows, PLANE: tl.constexpr, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
    SPREAD: tl.constexpr = fmt.planes[PLANE].spread
    at = offsets(fmt.code_nbytes, fmt, shape)
    packed = ()
    for r in tl.static_range(SPREAD):
        place = pointer + (at + (fmt.planes[PLANE].first_byte + r * fmt.length))
        packed = packed + (load_rows(place, rows[:, None], PLAIN),)
    return packed


@triton.jit
def add_source(totals, packed, scale, table, byte_bits, fmt: tl.constexpr):
    """Totals + what one source's codes stand for: a tuple of float32 parts. Where products with the scale are exact,
    the fused form rounds as the sum of both does.
    """
    PARTS: tl.constexpr = fmt.parts
    sums = ()
    for p in tl.static_range(PARTS):
        if fmt.ternary:
            total = totals[p] + trit_value(trit_of(packed[0].to(tl.int32), fmt), scale, fmt)
        elif fmt.e2m1:
            total = add_product(totals[p], e2m1_value(code_of(packed, p, fmt) - fmt.zero_code), scale)
        elif fmt.codebook_size > 0:
            total = totals[p] + codebook_value(packed, p, scale, table, fmt)
        elif len(fmt.planes) == 1:
            total = add_masked(totals[p], packed, p, scale, byte_bits, fmt)
        else:
            total = add_product(totals[p], grid_value(code_of(packed, p, fmt), fmt.qmax, byte_bits), scale)
        sums = sums + (total,)
    return sums


@triton.jit
def grid_value(code, QMAX: tl.constexpr, byte_bits):
    """Code - QMAX as float32, for a code below 256.

    `byte_bits` is not a constant: masking a field and or'ing BYTE_BITS is one instruction with one constant in it, but
    two instructions with two.
    """
    return (code | byte_bits).to(tl.float32, bitcast=True) - (BYTE + QMAX)


@triton.jit
def add_masked(total, packed, P: tl.constexpr, scale, byte_bits, fmt: tl.constexpr):
    """A field that stays where it is in its byte: 2**k times too large, which the scale takes back, exactly."""
    SPREAD: tl.constexpr = fmt.planes[0].spread
    WIDTH: tl.constexpr = fmt.planes[0].width
    K: tl.constexpr = (P // SPREAD) * WIDTH
    field = packed[P % SPREAD].to(tl.int32) & (((1 << WIDTH) - 1) << K)
    return add_product(total, grid_value(field, fmt.qmax << K, byte_bits), scale * (1.0 / (1 << K)))


@triton.jit
def code_of(packed, P: tl.constexpr, fmt: tl.constexpr):
    code = plane_field(packed, P, 0, fmt)
    for i in tl.static_range(1, len(fmt.planes)):
        code = code | plane_field(packed, P, i, fmt)
    return code


@triton.jit
def plane_field(packed, P: tl.constexpr, PLANE: tl.constexpr, fmt: tl.constexpr):
    SPREAD: tl.constexpr = fmt.planes[PLANE].spread
    WIDTH: tl.constexpr = fmt.planes[PLANE].width
    byte = packed[fmt.planes[PLANE].first_tensor + P % SPREAD].to(tl.int32)
    return ((byte >> ((P // SPREAD) * WIDTH)) & ((1 << WIDTH) - 1)) << fmt.planes[PLANE].shift


@triton.jit
def codebook_value(packed, P: tl.constexpr, scale, table, fmt: tl.constexpr):
    """Fitted codebook: the products with the scale are taken once per block, and a code's bits choose among them."""
    code = code_of(packed, P, fmt)
    if len(fmt.codebook) == 0:
        value = tl.load(table + (fmt.codebook_size - 1) + code) * scale[:, None]
    else:
        BITS: tl.constexpr = fmt.bits
        products = ()
        for i in tl.static_range(1 << BITS):
            products = products + ((scale * fmt.codebook[min(i, fmt.codebook_size - 1)])[:, None],)
        for bit in tl.static_range(BITS):
            chosen = ()
            for i in tl.static_range(len(products) // 2):
                chosen = chosen + (tl.where((code & (1 << bit)) != 0, products[2 * i + 1], products[2 * i]),)
            products = chosen
        value = products[0]
    return value


@triton.jit
def trit_value(trit, scale, fmt: tl.constexpr):
    low, middle = (scale * fmt.codebook[0])[:, None], (scale * fmt.codebook[1])[:, None]
    return tl.where(trit == 0, low, tl.where(trit == 1, middle, (scale * fmt.codebook[2])[:, None]))


@triton.jit
def trit_of(byte, fmt: tl.constexpr):
    """Element i is digit i // n of its byte in base 3; quotients of bytes by multiplication, exact below 256."""
    digit = tl.arange(0, fmt.block)[None, :] // fmt.code_nbytes
    reciprocal = tl.where(digit == 0, 65536, tl.where(digit == 1, 21846, tl.where(digit == 2, 7282, 0)))
    reciprocal = tl.where(digit == 3, 2428, tl.where(digit == 4, 810, reciprocal))
    quotient = (byte * reciprocal) >> 16
    return quotient - 3 * ((quotient * 171) >> 9)
