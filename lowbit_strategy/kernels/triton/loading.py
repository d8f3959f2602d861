"""Device functions: load a tile's elements, and a message's packed codes and scales, into registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def offsets(STRIDE: tl.constexpr, fmt: tl.constexpr, shape: tl.constexpr):
    """[rows, length]: offsets of neighbors, with STRIDE from row to row."""
    VECTOR: tl.constexpr = shape.vector
    at = tl.arange(0, shape.rows)[:, None] * STRIDE + tl.arange(0, fmt.length)[None, :]
    return tl.max_contiguous(at, [1, VECTOR])


@triton.jit
def load_parts(pointer, left, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
    """Tuple of [rows, length]; zeros beyond `left` elements unless PLAIN."""
    PARTS: tl.constexpr = fmt.parts
    at = offsets(fmt.block, fmt, shape)
    parts = ()
    for p in tl.static_range(PARTS):
        place = at + p * fmt.length
        if PLAIN:
            parts = parts + (tl.load(pointer + place),)
        else:
            parts = parts + (tl.load(pointer + place, mask=place < left, other=0),)
    return parts


@triton.jit
def load_codes(pointer, rows, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
    """The packed codes of the tile's blocks as a tuple of tensors: int32 words, or uint8 in the order of the planes."""
    if fmt.words:
        packed = (load_words(pointer, rows, fmt, shape, PLAIN),)
    else:
        packed = load_bytes(pointer, rows, fmt, shape, PLAIN)
    return packed


@triton.jit
def load_words(pointer, rows, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
    """int32 [rows, length / 4]."""
    WORDS: tl.constexpr = fmt.length // 4
    VECTOR: tl.constexpr = max(1, shape.vector // 4)
    at = tl.arange(0, shape.rows)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    place = pointer.to(tl.pointer_type(tl.int32)) + tl.max_contiguous(at, [1, VECTOR])
    return load_rows(place, rows[:, None], PLAIN)


@triton.jit
def load_bytes(pointer, rows, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
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
def load_rows(pointer, mask, PLAIN: tl.constexpr):
    if PLAIN:
        return tl.load(pointer)
    return tl.load(pointer, mask=mask, other=0)


@triton.jit
def load_scale(pointer, rows, shape: tl.constexpr, BYTES: tl.constexpr, PLAIN: tl.constexpr):
    """float32 [rows]."""
    row = tl.arange(0, shape.rows)
    if BYTES:
        low = load_rows(pointer + row * 2, rows, PLAIN).to(tl.int32)
        high = low | (load_rows(pointer + row * 2 + 1, rows, PLAIN).to(tl.int32) << 8)
    else:
        high = load_rows(pointer.to(tl.pointer_type(tl.int16)) + row, rows, PLAIN).to(tl.int32)
    return (high << 16).to(tl.float32, bitcast=True)
