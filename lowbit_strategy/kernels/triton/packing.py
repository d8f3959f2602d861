"""Codes and scales to the wire and back, on the device. Half-split packing keeps every byte within one lane."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit_strategy.kernels.triton.common import BYTE, BYTE_BITS, bits_of, offsets


@triton.jit
def store_rows(pointer, value, keep, FILL: tl.constexpr, rows, PLAIN: tl.constexpr):
    """Store `value` [K, L] in the rows that `keep` says, and FILL in the others: no select an element."""
    if not PLAIN:
        tl.store(pointer, value, mask=(keep & rows)[:, None])
        tl.store(pointer, tl.full(value.shape, FILL, value.dtype), mask=(rows & ~keep)[:, None])
    else:
        tl.store(pointer, value, mask=keep[:, None])
        tl.store(pointer, tl.full(value.shape, FILL, value.dtype), mask=(~keep)[:, None])


@triton.jit
def store_codes(
    pointer, codes, usable, rows, fmt: tl.constexpr, K: tl.constexpr, VECTOR: tl.constexpr, PLAIN: tl.constexpr
):
    """Pack `codes` and write them; the zero code where a block is not usable.

    On the uniform grid `codes` are integers -qmax ... qmax with anything above their low byte; else level numbers.
    """
    if fmt.rule == "ternary":
        store_trits(pointer, codes[0], usable, rows, fmt, K, PLAIN)
    else:
        for i in tl.static_range(len(fmt.planes)):
            store_plane(pointer, codes, usable, rows, fmt.planes[i], fmt, K, VECTOR, PLAIN)


@triton.jit
def store_plane(
    pointer,
    codes,
    usable,
    rows,
    plane: tl.constexpr,
    fmt: tl.constexpr,
    K: tl.constexpr,
    VECTOR: tl.constexpr,
    PLAIN: tl.constexpr,
):
    SPREAD: tl.constexpr = plane.spread
    at = offsets(fmt.code_nbytes, K, fmt.length, VECTOR)
    for r in tl.static_range(SPREAD):
        byte = plane_byte(codes, r, plane, fmt)
        place = pointer + (at + (plane.first_byte + r * fmt.length))
        store_rows(place, byte.to(tl.uint8), usable, plane.zero_byte, rows, PLAIN)


@triton.jit
def plane_byte(codes, R: tl.constexpr, plane: tl.constexpr, fmt: tl.constexpr):
    """int32 whose low byte holds the fields of parts R, R + spread, ... (element j in the lowest bits)."""
    PER_BYTE: tl.constexpr = 8 // plane.width
    if fmt.num_levels == 0 and len(fmt.planes) == 1:
        # (sum of q << k) + (sum of qmax << k): the same low byte as or'ing masked fields, with one add a part
        byte = codes[R] + plane.zero_byte
        for k in tl.static_range(1, PER_BYTE):
            byte += codes[R + k * plane.spread] << (k * plane.width)
    else:
        byte = code_field(codes[R], plane, fmt)
        for k in tl.static_range(1, PER_BYTE):
            byte |= code_field(codes[R + k * plane.spread], plane, fmt) << (k * plane.width)
    return byte


@triton.jit
def code_field(code, plane: tl.constexpr, fmt: tl.constexpr):
    if fmt.num_levels == 0:
        code = code + fmt.qmax
    return (code >> plane.shift) & ((1 << plane.width) - 1)


@triton.jit
def store_trits(pointer, code, usable, rows, fmt: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr):
    """Byte j holds elements j, j + n, ... j + 4n in base 3; elements past the block count as the zero code."""
    j = tl.arange(0, fmt.padded_nbytes)[None, :] + tl.zeros([K, fmt.padded_nbytes], tl.int32)
    byte = tl.zeros([K, fmt.padded_nbytes], tl.int32)
    for k in tl.static_range(5):
        element = j + k * fmt.code_nbytes
        trit = tl.gather(code, tl.minimum(element, fmt.block - 1), axis=1)
        byte += tl.where(element < fmt.block, trit, fmt.zero_code) * 3**k
    byte = tl.where(usable[:, None], byte, 121)  # five middle trits
    place = pointer + (tl.arange(0, K)[:, None] * fmt.code_nbytes + j)
    mask = j < fmt.code_nbytes
    if not PLAIN:
        mask = mask & rows[:, None]
    tl.store(place, byte.to(tl.uint8), mask=mask)


@triton.jit
def store_scale(pointer, scale, rows, K: tl.constexpr, BYTES: tl.constexpr, PLAIN: tl.constexpr):
    """bfloat16 [K] at a byte address; byte by byte where the address may be odd."""
    row = tl.arange(0, K)
    high = bits_of(scale) >> 16
    mask = None if PLAIN else rows
    if BYTES:
        tl.store(pointer + row * 2, (high & 0xFF).to(tl.uint8), mask=mask)
        tl.store(pointer + row * 2 + 1, (high >> 8).to(tl.uint8), mask=mask)
    else:
        tl.store(pointer.to(tl.pointer_type(tl.int16)) + row, high.to(tl.int16), mask=mask)


@triton.jit
def load_scale(pointer, rows, K: tl.constexpr, BYTES: tl.constexpr, PLAIN: tl.constexpr):
    """float32 [K]."""
    row = tl.arange(0, K)
    mask = None if PLAIN else rows
    other = None if PLAIN else 0
    if BYTES:
        low = tl.load(pointer + row * 2, mask=mask, other=other).to(tl.int32)
        high = low | (tl.load(pointer + row * 2 + 1, mask=mask, other=other).to(tl.int32) << 8)
    else:
        high = tl.load(pointer.to(tl.pointer_type(tl.int16)) + row, mask=mask, other=other).to(tl.int32)
    return (high << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_bytes(pointer, rows, fmt: tl.constexpr, K: tl.constexpr, VECTOR: tl.constexpr, PLAIN: tl.constexpr):
    """The packed codes of K blocks as a tuple of uint8 tensors, in the order of the planes."""
    packed = ()
    if fmt.rule == "ternary":
        element = tl.arange(0, fmt.block)[None, :] % fmt.code_nbytes
        at = tl.arange(0, K)[:, None] * fmt.code_nbytes + element
        packed = packed + (load_rows(pointer + at, rows, PLAIN),)
    else:
        for i in tl.static_range(len(fmt.planes)):
            packed = packed + load_plane(pointer, rows, fmt.planes[i], fmt, K, VECTOR, PLAIN)
    return packed


@triton.jit
def load_rows(pointer, rows, PLAIN: tl.constexpr):
    if PLAIN:
        return tl.load(pointer)
    return tl.load(pointer, mask=rows[:, None], other=0)


@triton.jit
def load_plane(
    pointer,
    rows,
    plane: tl.constexpr,
    fmt: tl.constexpr,
    K: tl.constexpr,
    VECTOR: tl.constexpr,
    PLAIN: tl.constexpr,
):
    SPREAD: tl.constexpr = plane.spread
    at = offsets(fmt.code_nbytes, K, fmt.length, VECTOR)
    packed = ()
    for r in tl.static_range(SPREAD):
        packed = packed + (load_rows(pointer + (at + (plane.first_byte + r * fmt.length)), rows, PLAIN),)
    return packed


@triton.jit
def unpack(packed, fmt: tl.constexpr):
    """Codes as a tuple of int32 parts [K, L]."""
    codes = ()
    if fmt.rule == "ternary":
        codes = codes + (trits(packed[0].to(tl.int32), fmt),)
    else:
        PARTS: tl.constexpr = fmt.parts
        for p in tl.static_range(PARTS):
            code = plane_field(packed, p, fmt.planes[0])
            for i in tl.static_range(1, len(fmt.planes)):
                code = code | plane_field(packed, p, fmt.planes[i])
            codes = codes + (code,)
    return codes


@triton.jit
def plane_field(packed, P: tl.constexpr, plane: tl.constexpr):
    byte = packed[plane.first_tensor + P % plane.spread].to(tl.int32)
    return ((byte >> ((P // plane.spread) * plane.width)) & ((1 << plane.width) - 1)) << plane.shift


@triton.jit
def trits(byte, fmt: tl.constexpr):
    """Element i is digit i // n of its byte in base 3."""
    digit = tl.arange(0, fmt.block)[None, :] // fmt.code_nbytes
    power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
    return (byte // power) % 3


@triton.jit
def level_values(codes, table, fmt: tl.constexpr):
    """float32: what each code stands for, in units of the scale."""
    values = ()
    for p in tl.static_range(len(codes)):
        if fmt.num_levels == 0:
            value = (codes[p] | BYTE_BITS).to(tl.float32, bitcast=True) - (BYTE + fmt.qmax)
        elif len(fmt.levels) > 0:
            value = tl.zeros_like(codes[p]).to(tl.float32) + fmt.levels[0]
            for i in tl.static_range(1, len(fmt.levels)):
                value = tl.where(codes[p] == i, fmt.levels[i], value)
        else:
            value = tl.load(table + (fmt.num_levels - 1) + codes[p])
        values = values + (value,)
    return values
