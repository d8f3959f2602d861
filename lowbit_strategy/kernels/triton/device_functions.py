"""Device functions shared by the kernels: where a tile lies, and the bits of its elements.

A tile is some whole blocks of one segment. A block's elements are held as a tuple of parts ``[rows, length]``, one row
per block, see `lowbit_strategy.kernels.triton.layout`; numbers of a block are ``[rows]``. Every float operation is the
one that `lowbit_strategy.kernels.reference` has, in its order; where a shorter form gives the same bits, a comment
says why.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAGNITUDE, TWO_MAGNITUDES = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7FFF7FFF)
HAS_PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
# four bytes of a register to float32, an instruction each; Triton would extend each byte's sign first
BYTES_PTX = tl.constexpr(
    "{ .reg .b32 a, b, c, d; "
    "bfe.s32 a, $4, 0, 8; bfe.s32 b, $4, 8, 8; bfe.s32 c, $4, 16, 8; bfe.s32 d, $4, 24, 8;"
    "cvt.rn.f32.s32 $0, a; cvt.rn.f32.s32 $1, b; cvt.rn.f32.s32 $2, c; cvt.rn.f32.s32 $3, d; }"
)
PAIR_PTX = tl.constexpr("mov.b32 $0, $2; mov.b32 $1, 0;")


@triton.jit
def locate(segment_of_tile, segments, TILE: tl.constexpr):
    """The segment's row, this program's tile within the segment, and the elements from there on (at most TILE)."""
    program = tl.program_id(0)
    row = segments + tl.load(segment_of_tile + program).to(tl.int64) * 7
    tile = program - tl.load(row + 5).to(tl.int32)
    left = tl.minimum(tl.load(row + 4) - tile.to(tl.int64) * TILE, TILE).to(tl.int32)
    return row, tile, left


@triton.jit
def ahead(base, tile, STEP: tl.constexpr):
    """Base + tile * STEP in 64 bits: buffers may be longer than 2**31."""
    return base + tile.to(tl.int64) * STEP


@triton.jit
def is_plain(pointer, left, TILE: tl.constexpr):
    """Whether the tile is whole and its floats start on 16 bytes: then no access needs a mask."""
    return (left == TILE) & ((pointer.to(tl.int64) & 15) == 0)


@triton.jit
def offsets(STRIDE: tl.constexpr, fmt: tl.constexpr, shape: tl.constexpr):
    """[rows, length]: places of neighbors, STRIDE from row to row."""
    VECTOR: tl.constexpr = shape.vector
    at = tl.arange(0, shape.rows)[:, None] * STRIDE + tl.arange(0, fmt.length)[None, :]
    return tl.max_contiguous(at, [1, VECTOR])


@triton.jit
def as_float32(parts):
    floats = ()
    for p in tl.static_range(len(parts)):
        if parts[p].dtype == tl.bfloat16:  # the upper half of a float32; by bits, denormals come through everywhere
            wide = parts[p].to(tl.int16, bitcast=True).to(tl.int32) << 16
            floats = floats + (wide.to(tl.float32, bitcast=True),)
        elif HAS_PTX and parts[p].dtype == tl.int8:
            floats = floats + (tl.inline_asm_elementwise(BYTES_PTX, "=r,=r,=r,=r,r", [parts[p]], tl.float32, True, 4),)
        else:
            floats = floats + (parts[p].to(tl.float32),)
    return floats


@triton.jit
def elements_in_rows(left, fmt: tl.constexpr, shape: tl.constexpr):
    """int32 [rows]: elements of each block that are not padding."""
    here = left - tl.arange(0, shape.rows) * fmt.block
    return tl.minimum(tl.maximum(here, 0), fmt.block)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def any_nonzero(parts):
    """Bool [rows]."""
    bits = registers(parts[0])
    for p in tl.static_range(1, len(parts)):
        bits = bits | registers(parts[p])
    MASK: tl.constexpr = MAGNITUDE if parts[0].dtype == tl.float32 else TWO_MAGNITUDES
    return (tl.reduce(bits, 1, either) & MASK) != 0


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def registers(x):
    """int32: the bits of elements. If two share a register, both are in the place of the first one, and 0 follows."""
    if x.dtype == tl.float32:
        bits = bits_of(x)
    elif HAS_PTX:
        bits = tl.inline_asm_elementwise(PAIR_PTX, "=r,=r,r", [x.to(tl.int16, bitcast=True)], tl.int32, True, 2)
    else:
        bits = x.to(tl.uint16, bitcast=True).to(tl.int32)
    return bits


@triton.jit
def add_product(total, value, scale):
    """Total + value * scale of the row, in one instruction: only where the product is exact."""
    return tl.fma(value, tl.broadcast_to(scale[:, None], value.shape), total)
