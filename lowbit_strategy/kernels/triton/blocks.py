"""Blockwise quantization on a GPU: encode, and decode with the sum over sources."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.kernels.triton.encode import encode_kernel
from lowbit_strategy.kernels.triton.layout import How, Launch, decode_launch, device_format, encode_launch, signed
from lowbit_strategy.kernels.triton.loading import load_codes, load_scale, offsets
from lowbit_strategy.kernels.triton.programs import Program
from lowbit_strategy.kernels.triton.tiles import CODES, NUMEL, SCALES, locate, tiles_of
from lowbit_strategy.kernels.triton.unpacking import add_source

SOURCES_AT_ONCE = tl.constexpr(8)  # loads in flight before the first is used


class Loops(NamedTuple):
    """Numbers of source groups and single sources that run-time loops add, and of sources outside loops."""

    groups: int
    singles: int
    unrolled: int


def loops_of(sources: int) -> Loops:
    """The loops for this number of sources. Beyond one group only loops are used, so one kernel fits any number."""
    if sources <= SOURCES_AT_ONCE.value:
        return Loops(0, 0, sources)
    groups, singles = divmod(sources, SOURCES_AT_ONCE.value)
    return Loops(groups, singles, 0)


class Common(NamedTuple):
    """Values that all tiles of a decoder share; `zero` is for `add_words`."""

    stride: tl.tensor
    alpha: tl.tensor
    zero: tl.tensor
    groups: tl.tensor
    singles: tl.tensor


@triton.jit
def add_sources(
    totals,
    codes_at,
    scales_at,
    rows,
    common,
    NUM: tl.constexpr,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Add source 0, source 1 ... to the totals, in this order; every load is issued before the first is used."""
    packed, scales = (), ()
    for s in tl.static_range(NUM):
        at = common.stride * s
        packed = packed + (load_codes(codes_at + at, rows, fmt, shape, PLAIN),)
        scales = scales + (load_scale(scales_at + at, rows, shape, fmt.code_nbytes % 2 != 0, PLAIN),)
    for s in tl.static_range(NUM):
        totals = add_source(totals, packed[s], scales[s], common.zero, fmt)
    return totals


@triton.jit
def interleaved(a, b, c, d):
    """[rows, 4 n] of four [rows, n]."""
    K: tl.constexpr = a.shape[0]
    N: tl.constexpr = a.shape[1]
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [K, 4 * N])


@triton.jit
def decode_tile(
    codes_at,
    scales_at,
    out,
    left,
    common,
    UNROLLED: tl.constexpr,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    PLAIN: tl.constexpr,
):
    PARTS: tl.constexpr = fmt.parts
    PIECES: tl.constexpr = 4 if fmt.words else 1
    K: tl.constexpr = shape.rows
    L: tl.constexpr = fmt.length // PIECES
    rows = left - tl.arange(0, shape.rows) * fmt.block > 0
    totals = ()
    for _ in tl.static_range(PARTS * PIECES):
        totals = totals + (tl.zeros([K, L], tl.float32),)
    if UNROLLED:
        totals = add_sources(totals, codes_at, scales_at, rows, common, UNROLLED, fmt, shape, PLAIN)
    else:
        for _ in tl.range(common.groups, num_stages=1):
            totals = add_sources(totals, codes_at, scales_at, rows, common, SOURCES_AT_ONCE, fmt, shape, PLAIN)
            codes_at += common.stride * SOURCES_AT_ONCE
            scales_at += common.stride * SOURCES_AT_ONCE
        for _ in tl.range(common.singles, num_stages=1):
            totals = add_sources(totals, codes_at, scales_at, rows, common, 1, fmt, shape, PLAIN)
            codes_at += common.stride
            scales_at += common.stride
    at = offsets(fmt.block, fmt, shape)
    for p in tl.static_range(PARTS):
        place = at + p * fmt.length
        total = totals[p]
        if fmt.words:
            total = interleaved(totals[4 * p], totals[4 * p + 1], totals[4 * p + 2], totals[4 * p + 3])
        value = (total * common.alpha).to(out.dtype.element_ty)
        if PLAIN:
            tl.store(out + place, value)
        else:
            tl.store(out + place, value, mask=place < left)


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
    fmt: tl.constexpr,
    shape: tl.constexpr,
    small: tl.constexpr,
):
    TILE: tl.constexpr = shape.rows * fmt.block
    row, tile, start, left, is_plain = locate(segment_of_tile, segments, out, TILE)
    out += start
    codes_at = wire + tl.multiple_of(tl.load(row + CODES), 16) + tile * (shape.rows * fmt.code_nbytes)
    scales_at = wire + tl.load(row + SCALES) + tile * (shape.rows * 2)
    stride = stride.to(tl.int64)
    # loaded, so that the compiler knows neither that it is 0 nor that all threads have the same
    zero = (tl.load(row + NUMEL) >> 62).to(tl.int32)
    common = Common(stride, alpha, zero, groups, singles)
    if is_plain:
        decode_tile(codes_at, scales_at, tl.multiple_of(out, 16), TILE, common, UNROLLED, fmt, shape, True)
    else:
        for i in range(shape.rows // small.rows):
            done = i * (small.rows * fmt.block)
            if left > done:
                codes, scales = codes_at + i * (small.rows * fmt.code_nbytes), scales_at + i * (small.rows * 2)
                decode_tile(codes, scales, out + done, left - done, common, UNROLLED, fmt, small, False)


def aligned(wire_WB: Tensor) -> Tensor:
    """The same rows, aligned to 16 bytes as in all messages; they are copied only if they are not."""
    if (wire_WB.data_ptr() | wire_WB.stride(0)) % 16:
        return torch.nn.functional.pad(wire_WB, (0, -wire_WB.shape[1] % 16))
    return wire_WB


def encode_(
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    fmt: BlockFormat,
    *,
    stochastic: bool,
    seed: int,
    flag: Tensor,
    feedback: Feedback | None = None,
    launch: Launch | None = None,
) -> None:
    if wire.data_ptr() % 4:  # messages are aligned: codes are written as words
        copy = wire.clone()
        encode_(x, copy, segments, fmt, stochastic=stochastic, seed=seed, flag=flag, feedback=feedback, launch=launch)
        wire.copy_(copy)
        return
    residual, residual_scale, beta, reset, dithered = feedback or (None, None, 0.0, False, False)
    how = How(stochastic, dithered and residual_scale is not None)
    kept = None if residual is None else residual.dtype

    def program() -> Program:
        device = device_format(fmt)
        chosen = launch or encode_launch(device, kept, how)
        tiles = tiles_of(segments, fmt, chosen.tile(fmt.block_size), x.device)
        constants = (device, *chosen.shapes(device), how)
        return Program(encode_kernel, tiles, x.device, constants, **chosen.options())

    segments.kept(("encode", fmt, x.dtype, x.device, kept, how, launch), program).launch(
        x,
        residual,
        residual_scale,
        wire,
        flag,
        float(beta),
        1.0 - beta,
        int(reset),
        signed(seed),  # so that the argument's type, and thus the compiled kernel, never changes
        aligned=all(each is None or each.data_ptr() % 16 == 0 for each in (residual, residual_scale, wire)),
    )


def decode_sum_(
    wire_WB: Tensor, out: Tensor, segments: Segments, fmt: BlockFormat, *, alpha: float, launch: Launch | None = None
) -> None:
    wire_WB = aligned(wire_WB)
    sources, stride = wire_WB.shape[0], wire_WB.stride(0)
    loops = loops_of(sources)

    def program() -> Program:
        device = device_format(fmt)
        chosen = launch or decode_launch(device)
        tiles = tiles_of(segments, fmt, chosen.tile(fmt.block_size), out.device)
        constants = (loops.unrolled, device, *chosen.shapes(device))
        return Program(decode_sum_kernel, tiles, out.device, constants, **chosen.options())

    segments.kept(("decode", fmt, out.dtype, out.device, sources, stride, launch), program).launch(
        wire_WB, stride, out, float(alpha), loops.groups, loops.singles
    )
