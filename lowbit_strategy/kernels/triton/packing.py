"""Device functions: write codes and scales to the wire. Half-split packing keeps every byte within one thread."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit_strategy.kernels.triton.bits import HAS_PTX, bits_of
from lowbit_strategy.kernels.triton.layout import signed
from lowbit_strategy.kernels.triton.loading import offsets
from lowbit_strategy.kernels.triton.quantize import ROUND, ROUND_BITS

ZERO_TRITS = tl.constexpr(121)  # five middle trits
# `e2m1_word`: two values to a register as bfloat16, times 2**-127, which has the magnitude in bits 6 to 8
E2M1_WORD_PTX = tl.constexpr(
    "{ .reg .b32 a, b, c, d, scale, zero, magnitudes, signs;"
    "mov.b32 scale, 0x00400040; mov.b32 zero, 0x80008000;"
    "cvt.rn.bf16x2.f32 a, $3, $1; cvt.rn.bf16x2.f32 b, $7, $5;"
    "cvt.rn.bf16x2.f32 c, $4, $2; cvt.rn.bf16x2.f32 d, $8, $6;"
    + "".join(f"fma.rn.bf16x2 {x}, {x}, scale, zero;" for x in "abcd")
    + "shr.u32 a, a, 6; shr.u32 b, b, 2; add.u32 a, a, b;"
    "shr.u32 c, c, 6; shr.u32 d, d, 2; add.u32 c, c, d;"
    "prmt.b32 magnitudes, a, c, 0x6240; prmt.b32 signs, a, c, 0x7351; shr.u32 signs, signs, 1;"
    "add.u32 magnitudes, magnitudes, signs; add.u32 magnitudes, magnitudes, 0x77777777;"
    "mul.lo.u32 signs, signs, 15; xor.b32 $0, magnitudes, signs; }"
)
FOUR_ROUND_BITS = tl.constexpr(signed(ROUND_BITS.value * 0x01010101))


@triton.jit
def store_rows(pointer, value, keep, FILL: tl.constexpr, rows):
    """Store `value` [rows, length] in the rows of `keep` and FILL in the others, without a select per element."""
    tl.store(pointer, value, mask=(keep & rows)[:, None])
    tl.store(pointer, tl.full(value.shape, FILL, value.dtype), mask=(rows & ~keep)[:, None])


@triton.jit
def store_codes(pointer, codes, usable, rows, fmt: tl.constexpr, shape: tl.constexpr):
    """Pack the codes from `quantize` and write them; the zero code where a block is not usable."""
    if fmt.ternary:
        store_trits(pointer, codes[0], usable, rows, fmt, shape)
    elif fmt.words:
        store_words(pointer, codes, usable, rows, fmt, shape)
    else:
        for i in tl.static_range(len(fmt.planes)):
            store_plane(pointer, codes, usable, rows, i, fmt, shape)


@triton.jit
def store_plane(pointer, codes, usable, rows, PLANE: tl.constexpr, fmt: tl.constexpr, shape: tl.constexpr):
    SPREAD: tl.constexpr = fmt.planes[PLANE].spread
    at = offsets(fmt.code_nbytes, fmt, shape)
    for r in tl.static_range(SPREAD):
        byte = plane_byte(codes, r, PLANE, fmt)
        place = pointer + (at + (fmt.planes[PLANE].first_byte + r * fmt.length))
        store_rows(place, byte.to(tl.uint8), usable, fmt.planes[PLANE].zero_byte, rows)


@triton.jit
def plane_byte(codes, R: tl.constexpr, PLANE: tl.constexpr, fmt: tl.constexpr):
    """int32 whose low byte holds the fields of parts R, R + spread, ... (element j in the lowest bits)."""
    WIDTH: tl.constexpr = fmt.planes[PLANE].width
    PER_BYTE: tl.constexpr = 8 // fmt.planes[PLANE].width
    SPREAD: tl.constexpr = fmt.planes[PLANE].spread
    if len(fmt.planes) == 1:
        # sum of code * 2**k, exact in float32: no shifts, no masks, and no carry leaves the byte
        total = codes[R] + ROUND
        for k in tl.static_range(1, PER_BYTE):
            power = tl.full(total.shape, 1.0 * (1 << (k * WIDTH)), tl.float32)
            total = tl.fma(codes[R + k * SPREAD], power, total)
        byte = bits_of(total)
    else:
        byte = code_field(codes[R], PLANE, fmt)
        for k in tl.static_range(1, PER_BYTE):
            byte |= code_field(codes[R + k * SPREAD], PLANE, fmt) << (k * WIDTH)
    return byte


@triton.jit
def store_words(pointer, codes, usable, rows, fmt: tl.constexpr, shape: tl.constexpr):
    """Store codes of one plane, four neighboring bytes at a time: `load_words` reads them."""
    WORDS: tl.constexpr = fmt.length // 4
    VECTOR: tl.constexpr = max(1, shape.vector // 4)
    if fmt.e2m1:
        word = e2m1_word(quarters(codes[0]), quarters(codes[1]))
    else:
        word = integer_word(codes, fmt)
    at = tl.arange(0, shape.rows)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    place = pointer.to(tl.pointer_type(tl.int32)) + tl.max_contiguous(at, [1, VECTOR])
    store_rows(place, word, usable, fmt.zero_word, rows)


@triton.jit
def quarters(x):
    """Split each four neighbors into first, second, third and fourth: a tuple of [rows, length / 4]."""
    K: tl.constexpr = x.shape[0]
    L: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [K, L // 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def integer_word(codes, fmt: tl.constexpr):
    """Sum of number * 2**k, where codes are number - qmax, plus ROUND in the first part. The bits of a float near ROUND
    count up with it, and sums of bits wrap: the contribution of ROUND's own bits is known, and subtracted at the end.
    """
    PARTS: tl.constexpr = fmt.parts
    total = codes[0]
    for p in tl.static_range(1, PARTS):
        power = tl.full(total.shape, 1.0 * (1 << (p * fmt.bits)), tl.float32)
        total = tl.fma(codes[p], power, total)
    a, b, c, d = quarters(bits_of(total))
    word = ((d * 256 + c) * 256 + b) * 256 + a
    return word - FOUR_ROUND_BITS + fmt.zero_word


@triton.jit
def two_bytes(low, high, next_low, next_high):
    """Magnitudes in the lower of each two bytes, signs in the other, two bits higher."""
    total = (tiny(low) >> 22) + (tiny(high) >> 18) + (tiny(next_low) >> 6) + (tiny(next_high) >> 2)
    return total.to(tl.int32, bitcast=True)


@triton.jit
def tiny(value):
    """uint32: sign in bit 31, magnitude in bits 22 to 24, others 0: a float with subnormal values, like E2M1."""
    return bits_of(value * 2.0**-127).to(tl.uint32, bitcast=True)


@triton.jit
def e2m1_word(low, high):
    """Word of codes from the values of the bytes' low and high halves."""
    if HAS_PTX:
        values = [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
        return tl.inline_asm_elementwise(E2M1_WORD_PTX, "=r,r,r,r,r,r,r,r,r", values, tl.int32, True, 1)
    even, odd = two_bytes(low[0], high[0], low[2], high[2]), two_bytes(low[1], high[1], low[3], high[3])
    magnitudes = (even & 0x00FF00FF) | ((odd & 0x00FF00FF) << 8)
    signs = ((even >> 9) & 0x00110011) | ((odd >> 1) & 0x11001100)
    return (magnitudes + signs + 0x77777777) ^ (signs * 15)  # 7 plus or minus the magnitude


@triton.jit
def code_field(code, PLANE: tl.constexpr, fmt: tl.constexpr):
    number = bits_of(code + (fmt.qmax if len(fmt.codebook) == 0 else ROUND))
    return (number >> fmt.planes[PLANE].shift) & ((1 << fmt.planes[PLANE].width) - 1)


@triton.jit
def store_trits(pointer, code, usable, rows, fmt: tl.constexpr, shape: tl.constexpr):
    """Byte j holds elements j, j + n, ... j + 4n in base 3; elements past the block count as the zero code."""
    K: tl.constexpr = shape.rows
    PADDED: tl.constexpr = fmt.padded_nbytes
    j = tl.arange(0, PADDED)[None, :] + tl.zeros([K, PADDED], tl.int32)
    number = bits_of(code + ROUND) & 3
    byte = tl.zeros([K, PADDED], tl.int32)
    for k in tl.static_range(5):
        element = j + k * fmt.code_nbytes
        trit = tl.gather(number, tl.minimum(element, fmt.block - 1), axis=1)
        byte += tl.where(element < fmt.block, trit, fmt.zero_code) * 3**k
    byte = tl.where(usable[:, None], byte, ZERO_TRITS)
    place = pointer + (tl.arange(0, shape.rows)[:, None] * fmt.code_nbytes + j)
    tl.store(place, byte.to(tl.uint8), mask=(j < fmt.code_nbytes) & rows[:, None])


@triton.jit
def store_once(pointer, at, value, mask, shape: tl.constexpr):
    """Store one number per block [rows] at ``pointer + at``, from the first of the threads that hold the block.

    A plain [rows] store has its own layout: the conversion costs a trip through shared memory with two barriers. As
    ``[rows, threads]`` with one thread unmasked, the layout is the one the block's elements have, if threads look like
    neighbors in memory (hence ``+ thread``) and rows do not (Triton does not see through ``3 * at - 2 * at``, which
    LLVM folds). `pointer` must not be known to be aligned.
    """
    K: tl.constexpr = shape.rows
    THREADS: tl.constexpr = shape.threads
    thread = tl.arange(0, THREADS)[None, :]
    place = pointer + ((at * 3 - at * 2)[:, None] + thread)
    tl.store(place, tl.broadcast_to(value[:, None], [K, THREADS]), mask=mask[:, None] & (thread == 0))


@triton.jit
def raise_flag(flag, here, shape: tl.constexpr):
    K: tl.constexpr = shape.rows
    store_once(flag, tl.zeros([K], tl.int32), tl.full([K], 1, tl.int32), here, shape)


@triton.jit
def store_scale(pointer, scale, rows, shape: tl.constexpr, BYTES: tl.constexpr):
    """bfloat16 [rows]; byte by byte where the address may be odd."""
    row = tl.arange(0, shape.rows)
    high = bits_of(scale) >> 16
    if BYTES:
        store_once(pointer, row * 2, (high & 0xFF).to(tl.uint8), rows, shape)
        store_once(pointer, row * 2 + 1, (high >> 8).to(tl.uint8), rows, shape)
    else:
        store_once(pointer.to(tl.pointer_type(tl.int16)), row, high.to(tl.int16), rows, shape)
