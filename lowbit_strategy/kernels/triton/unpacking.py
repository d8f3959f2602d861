"""Device functions: decode packed codes, multiply by the scale, and add to a sum.

Formats with codes of one plane that stand for integers or E2M1 are read as words ``[rows, length / 4]`` of four
neighboring bytes: element ``4 j + b`` of part p is a field of word j, at bit ``8 b + p * width``. Their totals are kept
in this order, part by part, each as four tensors. All other formats are read byte by byte.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from lowbit_strategy.kernels.format import E2M1
from lowbit_strategy.kernels.triton.bits import HAS_PTX

BYTE_BITS = tl.constexpr(0x4B000000)  # the bits of 2**23: a number or'ed into its mantissa is added to it
SIGN = tl.constexpr(-(2**31))


def _float16_bytes() -> tuple[int, int, int, int]:
    """Tables of eight bytes for the codes 0 to 7 and 8 to 15 of E2M1: the upper byte of each value in float16.

    For negative values half of that byte, since `prmt` gives 0 for an index of 8 or more only if bytes are below 128.
    """
    high = [struct.pack("<e", value)[1] for value in E2M1]
    negative = bytes([*((0x80 | byte) >> 1 for byte in reversed(high)), 0])
    return struct.unpack("<4I", negative + bytes([*high, 0]))


_TABLES = _float16_bytes()
FIRST_NEGATIVE, FIRST_POSITIVE = tl.constexpr(_TABLES[0]), tl.constexpr(_TABLES[2])
# the values of the eight codes of word $8, from the lowest; $9 and $10 are the first halves of both tables
_LOOK_UP = """
    prmt.b32 negative, $9, {negative:#x}, {word};
    prmt.b32 positive, $10, {positive:#x}, mirrored;
    mad.lo.u32 bytes, negative, 2, positive;
    prmt.b32 pair, bytes, 0, 0x1404; mov.b32 {{first, second}}, pair;
    cvt.f32.f16 ${0}, first; cvt.f32.f16 ${1}, second;
    prmt.b32 pair, bytes, 0, 0x3424; mov.b32 {{first, second}}, pair;
    cvt.f32.f16 ${2}, first; cvt.f32.f16 ${3}, second;"""
E2M1_PTX = tl.constexpr(
    "{ .reg .b32 word, mirrored, negative, positive, bytes, pair; .reg .b16 first, second;"
    "xor.b32 mirrored, $8, 0x88888888; shr.u32 word, $8, 16;"
    + _LOOK_UP.format(0, 1, 2, 3, word="$8", negative=_TABLES[1], positive=_TABLES[3])
    + "shr.u32 mirrored, mirrored, 16;"
    + _LOOK_UP.format(4, 5, 6, 7, word="word", negative=_TABLES[1], positive=_TABLES[3])
    + "}"
)
# The same on GPUs that convert from E2M1, whose values are half of ours: first 7 plus or minus the magnitude becomes a
# sign and the magnitude, for all eight at once. -0 for 0 changes no sum, which begins at +0.
BLACKWELL_PTX = tl.constexpr(
    "{ .reg .b32 signs, ones, word, first, second, third, fourth; .reg .b8 a, b, c, d; .reg .b16 low, high;"
    "not.b32 signs, $8; and.b32 signs, signs, 0x88888888; shr.u32 ones, signs, 3;"
    "sub.u32 word, signs, ones; xor.b32 word, word, $8; xor.b32 word, word, 0x88888888;"
    "sub.u32 word, word, ones; add.u32 word, word, 0x11111111; mov.b32 {a, b, c, d}, word;"
    "cvt.rn.f16x2.e2m1x2 first, a; cvt.rn.f16x2.e2m1x2 second, b;"
    "cvt.rn.f16x2.e2m1x2 third, c; cvt.rn.f16x2.e2m1x2 fourth, d;"
    + "".join(
        f"mov.b32 {{low, high}}, {pair}; cvt.f32.f16 ${2 * i}, low; cvt.f32.f16 ${2 * i + 1}, high;"
        for i, pair in enumerate(("first", "second", "third", "fourth"))
    )
    + "}"
)


@triton.jit
def add_source(totals, packed, scale, zero, fmt: tl.constexpr):
    """Totals plus one source's decoded values: a tuple of float32 parts."""
    if fmt.words:
        sums = add_words(totals, packed[0], scale, zero, fmt)
    else:
        sums = add_bytes(totals, packed, scale, zero, fmt)
    return sums


@triton.jit
def add_words(totals, word, scale, zero, fmt: tl.constexpr):
    """Totals plus one source's decoded values. Products with the scale are exact: the fused form rounds like a sum.

    `zero` is 0 but not a constant: a sum with it stays in a register, while a constant would be moved each time, or
    would split an instruction that has a different constant into two.
    """
    sums = ()
    if fmt.e2m1:
        if HAS_PTX and cuda_capability_geq(10):
            values = tl.inline_asm_elementwise(
                BLACKWELL_PTX, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [word], (tl.float32,) * 8, True, 1
            )
            scale = scale * 2
        else:
            values = e2m1_values(word, zero, fmt)
        for i in tl.static_range(8):
            sums = sums + (add_product(totals[i], values[2 * (i % 4) + i // 4], scale),)
    else:
        for i in tl.static_range(4 * fmt.parts):
            value = integer(word, 8 * (i % 4) + (i // 4) * fmt.bits, fmt.bits, fmt.qmax, zero)
            sums = sums + (add_product(totals[i], value, scale),)
    return sums


@triton.jit
def integer(word, AT: tl.constexpr, WIDTH: tl.constexpr, QMAX: tl.constexpr, zero):
    """The field at bit AT, minus QMAX, as float32. The field stays in place, in the mantissa of a power of two whose
    last places it fills. Fields that are not below the exponent are moved.
    """
    PLACE: tl.constexpr = AT if AT + WIDTH <= 23 else AT - 16
    moved = word if PLACE == AT else word >> 16
    bits = (moved & (((1 << WIDTH) - 1) << PLACE)) | (zero + (BYTE_BITS - (PLACE << 23)))
    return bits.to(tl.float32, bitcast=True) - (1.0 * (1 << (23 - PLACE)) + QMAX)


@triton.jit
def e2m1_values(word, zero, fmt: tl.constexpr):
    if HAS_PTX:
        tables = [word, zero + FIRST_NEGATIVE, zero + FIRST_POSITIVE]
        return tl.inline_asm_elementwise(
            E2M1_PTX, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r", tables, (tl.float32,) * 8, True, 1
        )
    values = ()
    for i in tl.static_range(8):
        number = ((word >> (4 * i)) & 15) - fmt.zero_code
        bits = (tl.abs(number) << 22) | (number & SIGN)  # a float format with subnormal values, like E2M1
        values = values + (bits.to(tl.float32, bitcast=True) * 2.0**127,)
    return values


@triton.jit
def add_bytes(totals, packed, scale, zero, fmt: tl.constexpr):
    PARTS: tl.constexpr = fmt.parts
    sums = ()
    for p in tl.static_range(PARTS):
        if fmt.ternary:
            total = totals[p] + trit_value(trit_of(packed[0].to(tl.int32), fmt), scale, fmt)
        elif len(fmt.codebook) > 0:
            total = totals[p] + codebook_value(packed, p, scale, fmt)
        else:
            total = add_product(totals[p], integer(code_of(packed, p, fmt), 0, fmt.bits, fmt.qmax, zero), scale)
        sums = sums + (total,)
    return sums


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
def codebook_value(packed, P: tl.constexpr, scale, fmt: tl.constexpr):
    """Fitted codebook: products with the scale are computed once per block, and a code's bits choose among them."""
    code = code_of(packed, P, fmt)
    BITS: tl.constexpr = fmt.bits
    products = ()
    for i in tl.static_range(1 << BITS):
        products = products + ((scale * fmt.codebook[min(i, len(fmt.codebook) - 1)])[:, None],)
    for bit in tl.static_range(BITS):
        chosen = ()
        for i in tl.static_range(len(products) // 2):
            chosen = chosen + (tl.where((code & (1 << bit)) != 0, products[2 * i + 1], products[2 * i]),)
        products = chosen
    return products[0]


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


@triton.jit
def add_product(total, value, scale):
    """Total + value * the row's scale, in one instruction; only for exact products."""
    return tl.fma(value, tl.broadcast_to(scale[:, None], value.shape), total)
