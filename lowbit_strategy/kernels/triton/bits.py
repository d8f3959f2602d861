"""Device functions shared by the kernels: the bits of elements.

Kernels do the float operations of `lowbit_strategy.kernels.reference` in the same order; where a shorter form gives the
same bits, a comment says why.
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
def as_float32(parts):
    floats = ()
    for p in tl.static_range(len(parts)):
        if parts[p].dtype == tl.bfloat16:  # the upper half of a float32; by bits, which keeps denormals
            wide = parts[p].to(tl.int16, bitcast=True).to(tl.int32) << 16
            floats = floats + (wide.to(tl.float32, bitcast=True),)
        elif HAS_PTX and parts[p].dtype == tl.int8:
            floats = floats + (tl.inline_asm_elementwise(BYTES_PTX, "=r,=r,=r,=r,r", [parts[p]], tl.float32, True, 4),)
        else:
            floats = floats + (parts[p].to(tl.float32),)
    return floats


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
    """int32: the bits of elements. If two share a register, both are in the first one's place, followed by 0."""
    if x.dtype == tl.float32:
        bits = bits_of(x)
    elif HAS_PTX:
        bits = tl.inline_asm_elementwise(PAIR_PTX, "=r,=r,r", [x.to(tl.int16, bitcast=True)], tl.int32, True, 2)
    else:
        bits = x.to(tl.uint16, bitcast=True).to(tl.int32)
    return bits
