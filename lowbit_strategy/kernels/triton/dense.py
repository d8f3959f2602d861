"""Unquantized floats on a GPU, with one launch for all segments of a bucket."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowbit_strategy.kernels.format import DenseFormat
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.kernels.triton.bits import MAGNITUDE, as_float32, bits_of
from lowbit_strategy.kernels.triton.blocks import SOURCES_AT_ONCE, loops_of
from lowbit_strategy.kernels.triton.layout import Launch
from lowbit_strategy.kernels.triton.programs import Program
from lowbit_strategy.kernels.triton.scales import INFINITY, NAN_BITS
from lowbit_strategy.kernels.triton.tiles import CODES, locate, tiles_of

LAUNCH = Launch(elements_per_thread=8, num_warps=4, vector=4)
VECTOR = tl.constexpr(4)  # neighboring elements of a thread, for all dtypes, so that no layout is converted
MINUS_ZERO_BITS = tl.constexpr(-(2**31))


@triton.jit
def load_float32(pointer, at, left, PLAIN: tl.constexpr):
    if PLAIN:
        value = tl.load(pointer + at)
    else:
        value = tl.load(pointer + at, mask=at < left, other=0)
    return as_float32((value,))[0]


@triton.jit
def to_bfloat16_bits(x):
    """int16: the nearest bfloat16, ties to even, by bits, since a conversion's NaN differs between GPUs."""
    bits = bits_of(x)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (tl.where((bits & MAGNITUDE) > INFINITY, NAN_BITS, rounded) >> 16).to(tl.int16)


@triton.jit
def encode_piece(x, wire, left, flag, NARROW: tl.constexpr, SIZE: tl.constexpr, PLAIN: tl.constexpr):
    at = tl.max_contiguous(tl.arange(0, SIZE), VECTOR)
    value = load_float32(x, at, left, PLAIN)
    if NARROW:
        sent = to_bfloat16_bits(value)
        magnitude = (sent.to(tl.int32) & 0x7FFF) << 16
        place = wire.to(tl.pointer_type(tl.int16)) + at
    else:
        sent = bits_of(value)
        magnitude = sent & MAGNITUDE
        place = wire.to(tl.pointer_type(tl.int32)) + at
    if PLAIN:
        tl.store(place, sent)
    else:
        tl.store(place, sent, mask=at < left)
    if tl.max(magnitude, axis=0) >= INFINITY:
        tl.store(flag, 1)


@triton.jit(do_not_specialize_on_alignment=["x", "flag"])
def encode_kernel(segment_of_tile, segments, x, wire, flag, NARROW: tl.constexpr, SIZE: tl.constexpr):
    NBYTES: tl.constexpr = 2 if NARROW else 4
    row, tile, start, left, is_plain = locate(segment_of_tile, segments, x, SIZE)
    source = x + start
    target = wire + tl.multiple_of(tl.load(row + CODES), 16) + tile * (SIZE * NBYTES)
    if is_plain:
        encode_piece(tl.multiple_of(source, 16), target, left, flag, NARROW, SIZE, True)
    else:
        encode_piece(source, target, left, flag, NARROW, SIZE, False)


@triton.jit
def add_sources(total, wire, stride, left, NUM: tl.constexpr, NARROW: tl.constexpr, PLAIN: tl.constexpr):
    """Total + source 0 + source 1 ..., in this order; every load is issued before the first is used."""
    at = tl.max_contiguous(tl.arange(0, total.shape[0]), VECTOR)
    values = ()
    for s in tl.static_range(NUM):
        if NARROW:
            pointer = (wire + stride * s).to(tl.pointer_type(tl.bfloat16))
        else:
            pointer = (wire + stride * s).to(tl.pointer_type(tl.float32))
        values = values + (load_float32(pointer, at, left, PLAIN),)
    for s in tl.static_range(NUM):
        total += values[s]
    return total


@triton.jit
def decode_piece(
    wire,
    stride,
    out,
    left,
    alpha,
    groups,
    singles,
    UNROLLED: tl.constexpr,
    NARROW: tl.constexpr,
    SIZE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    # -0.0, which leaves every number unchanged, even -0; tl.full would make it +0
    total = tl.full([SIZE], MINUS_ZERO_BITS, tl.int32).to(tl.float32, bitcast=True)
    if UNROLLED:
        total = add_sources(total, wire, stride, left, UNROLLED, NARROW, PLAIN)
    else:
        for _ in tl.range(groups, num_stages=1):
            total = add_sources(total, wire, stride, left, SOURCES_AT_ONCE, NARROW, PLAIN)
            wire += stride * SOURCES_AT_ONCE
        for _ in tl.range(singles, num_stages=1):
            total = add_sources(total, wire, stride, left, 1, NARROW, PLAIN)
            wire += stride
    at = tl.max_contiguous(tl.arange(0, SIZE), VECTOR)
    value = (total * alpha).to(out.dtype.element_ty)
    if PLAIN:
        tl.store(out + at, value)
    else:
        tl.store(out + at, value, mask=at < left)


@triton.jit(do_not_specialize=["groups", "singles"], do_not_specialize_on_alignment=["out"])
def decode_sum_kernel(
    segment_of_tile,
    segments,
    wire,
    stride,
    out,
    alpha,
    groups,
    singles,
    UNROLLED: tl.constexpr,
    NARROW: tl.constexpr,
    SIZE: tl.constexpr,
):
    NBYTES: tl.constexpr = 2 if NARROW else 4
    row, tile, start, left, is_plain = locate(segment_of_tile, segments, out, SIZE)
    target = out + start
    source = wire + tl.multiple_of(tl.load(row + CODES), 16) + tile * (SIZE * NBYTES)
    stride = stride.to(tl.int64)
    if is_plain:
        here = tl.multiple_of(target, 16)
        decode_piece(source, stride, here, left, alpha, groups, singles, UNROLLED, NARROW, SIZE, True)
    else:
        decode_piece(source, stride, target, left, alpha, groups, singles, UNROLLED, NARROW, SIZE, False)


def encode_(x: Tensor, wire: Tensor, segments: Segments, fmt: DenseFormat, *, flag: Tensor) -> None:
    def program() -> Program:
        tile = LAUNCH.tile(fmt.block_size)
        constants = (fmt.code_nbytes == 2, tile)
        tiles = tiles_of(segments, fmt, tile, x.device)
        return Program(encode_kernel, tiles, x.device, constants, **LAUNCH.options())

    segments.kept(("encode", fmt, x.dtype, x.device), program).launch(x, wire, flag, aligned=wire.data_ptr() % 16 == 0)


def decode_sum_(wire_WB: Tensor, out: Tensor, segments: Segments, fmt: DenseFormat, *, alpha: float) -> None:
    sources, stride = wire_WB.shape[0], wire_WB.stride(0)
    if (wire_WB.data_ptr() | stride) % fmt.code_nbytes:
        raise ValueError(f"rows of the wire must start on multiples of {fmt.code_nbytes} bytes")
    loops = loops_of(sources)

    def program() -> Program:
        tile = LAUNCH.tile(fmt.block_size)
        constants = (loops.unrolled, fmt.code_nbytes == 2, tile)
        return Program(
            decode_sum_kernel, tiles_of(segments, fmt, tile, out.device), out.device, constants, **LAUNCH.options()
        )

    segments.kept(("decode", fmt, out.dtype, out.device, sources, stride), program).launch(
        wire_WB, stride, out, float(alpha), loops.groups, loops.singles, aligned=wire_WB.data_ptr() % 16 == 0
    )
