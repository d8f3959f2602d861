"""Blockwise quantisation on a GPU: encode, and decode with the sum over sources."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.reference.rng import CODE_STREAM as _CODE_STREAM
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.kernels.triton.common import (
    as_float32,
    block_scale,
    inverse,
    is_plain,
    load_parts,
    locate,
    nearest_levels,
    offsets,
    round_parts,
    rows_left,
    stream_key,
    wire_place,
)
from lowbit_strategy.kernels.triton.layout import DeviceFormat, device_format, level_table
from lowbit_strategy.kernels.triton.packing import (
    level_values,
    load_bytes,
    load_scale,
    store_codes,
    store_scale,
    unpack,
)
from lowbit_strategy.kernels.triton.tiles import Launch, decode_launch, encode_launch, tiles_of

CODE_STREAM = tl.constexpr(_CODE_STREAM)
SOURCES_AT_ONCE = tl.constexpr(8)  # loads in flight before the first is used


@triton.jit
def quantize(
    h,
    scale,
    first,
    seed,
    salt,
    table,
    fmt: tl.constexpr,
    K: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Codes, what they stand for in units of the scale, and the blocks that have any: bool [K]."""
    scale_inverse, usable = inverse(scale)
    if fmt.num_levels > 0:
        codes, values = nearest_levels(h, scale_inverse, table, fmt)
    else:
        key = stream_key(seed, salt, CODE_STREAM) if STOCHASTIC else 0
        codes, values = round_parts(h, scale_inverse, first, key, fmt.qmax, fmt, K, STOCHASTIC)
    return codes, values, usable


@triton.jit
def encode_tile(
    x,
    codes_at,
    scales_at,
    left,
    first,
    seed,
    salt,
    table,
    flag,
    fmt: tl.constexpr,
    K: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PLAIN: tl.constexpr,
):
    rows = rows_left(left, fmt.block, K) > 0
    h = as_float32(load_parts(x, left, fmt, K, VECTOR, PLAIN))
    scale, finite = block_scale(h, left, fmt, K, PLAIN)
    codes, values, usable = quantize(h, scale, first, seed, salt, table, fmt, K, STOCHASTIC)
    store_codes(codes_at, codes, usable, rows, fmt, K, VECTOR, PLAIN)
    store_scale(scales_at, scale, rows, K, BYTES, PLAIN)
    raise_flag(flag, rows & ~finite, K)


@triton.jit
def raise_flag(flag, here, K: tl.constexpr):
    tl.store(flag + tl.zeros([K], tl.int32), tl.full([K], 1, tl.int32), mask=here)


@triton.jit(do_not_specialize=["seed"], do_not_specialize_on_alignment=["x"])
def encode_kernel(
    x,
    wire,
    segment_of_tile,
    segments,
    table,
    flag,
    seed,
    fmt: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    K: tl.constexpr = TILE // fmt.block
    row, start = locate(segment_of_tile, segments, TILE)
    codes, scales, left = wire_place(row, start, fmt, TILE)
    here = x + (tl.load(row) + start)
    salt = tl.load(row + 4)
    codes_at = wire + codes
    scales_at = wire + scales
    if is_plain(here, left, TILE):
        here = tl.multiple_of(here, 16)
        encode_tile(
            here, codes_at, scales_at, left, start, seed, salt, table, flag, fmt, K, VECTOR, BYTES, STOCHASTIC, True
        )
    else:
        encode_tile(
            here, codes_at, scales_at, left, start, seed, salt, table, flag, fmt, K, VECTOR, BYTES, STOCHASTIC, False
        )


@triton.jit
def add_sources(
    totals,
    wire,
    stride,
    codes,
    scales,
    rows,
    table,
    NUM: tl.constexpr,
    fmt: tl.constexpr,
    K: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Totals + source 0 + source 1 ..., in this order; every load is issued before the first is used."""
    packed, source_scales = (), ()
    for s in tl.static_range(NUM):
        source = wire + stride * s
        packed = packed + (load_bytes(source + codes, rows, fmt, K, VECTOR, PLAIN),)
        source_scales = source_scales + (load_scale(source + scales, rows, K, BYTES, PLAIN),)
    for s in tl.static_range(NUM):
        values = level_values(unpack(packed[s], fmt), table, fmt)
        sums = ()
        for p in tl.static_range(len(values)):
            scale = source_scales[s][:, None]
            if fmt.num_levels == 0:
                sums = sums + (tl.fma(values[p], tl.broadcast_to(scale, values[p].shape), totals[p]),)
            else:
                sums = sums + (totals[p] + values[p] * scale,)
        totals = sums
    return totals


@triton.jit
def decode_tile(
    wire,
    stride,
    codes,
    scales,
    out,
    left,
    alpha,
    table,
    SOURCES: tl.constexpr,
    fmt: tl.constexpr,
    K: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    PARTS: tl.constexpr = fmt.parts
    rows = rows_left(left, fmt.block, K) > 0
    totals = ()
    for p in tl.static_range(PARTS):
        totals = totals + (tl.zeros([K, fmt.length], tl.float32),)
    for i in tl.static_range((SOURCES + SOURCES_AT_ONCE - 1) // SOURCES_AT_ONCE):
        totals = add_sources(
            totals,
            wire + stride * (i * SOURCES_AT_ONCE),
            stride,
            codes,
            scales,
            rows,
            table,
            min(SOURCES - i * SOURCES_AT_ONCE, SOURCES_AT_ONCE),
            fmt,
            K,
            VECTOR,
            BYTES,
            PLAIN,
        )
    at = offsets(fmt.block, K, fmt.length, VECTOR)
    for p in tl.static_range(PARTS):
        place = out + (at + p * fmt.length)
        value = (totals[p] * alpha).to(out.dtype.element_ty)
        if PLAIN:
            tl.store(place, value)
        else:
            tl.store(place, value, mask=at + p * fmt.length < left)


@triton.jit(do_not_specialize_on_alignment=["out"])
def decode_sum_kernel(
    wire,
    stride,
    out,
    segment_of_tile,
    segments,
    table,
    alpha,
    SOURCES: tl.constexpr,
    fmt: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
):
    K: tl.constexpr = TILE // fmt.block
    row, start = locate(segment_of_tile, segments, TILE)
    codes, scales, left = wire_place(row, start, fmt, TILE)
    here = out + (tl.load(row) + start)
    if is_plain(here, left, TILE):
        here = tl.multiple_of(here, 16)
        decode_tile(wire, stride, codes, scales, here, left, alpha, table, SOURCES, fmt, K, VECTOR, BYTES, True)
    else:
        decode_tile(wire, stride, codes, scales, here, left, alpha, table, SOURCES, fmt, K, VECTOR, BYTES, False)


def int32_of(seed: int) -> int:
    """The same 32 bits, so that the argument's type (and with it the compiled kernel) never changes."""
    return (seed & 0xFFFFFFFF) - ((seed & 0x80000000) << 1)


def needs_bytes(wire: Tensor, device: DeviceFormat, stride: int = 0) -> bool:
    """Whether scales may lie at odd addresses."""
    return bool(device.code_nbytes % 2 or wire.data_ptr() % 2 or stride % 2)


def encode_(
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    fmt: BlockFormat,
    *,
    stochastic: bool,
    seed: int,
    flag: Tensor,
    launch: Launch | None = None,
) -> None:
    device = device_format(fmt)
    launch = launch or encode_launch(device, x.dtype, None)
    tile = launch.tile(fmt.block_size)
    tiles = tiles_of(segments, fmt.block_size, tile, x.device)
    if tiles.count == 0:
        return
    encode_kernel[(tiles.count,)](
        x,
        wire,
        tiles.segment_of_tile,
        tiles.rows,
        level_table(fmt, x.device),
        flag,
        int32_of(seed),
        fmt=device,
        TILE=tile,
        VECTOR=launch.vector,
        BYTES=needs_bytes(wire, device),
        STOCHASTIC=stochastic,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,
    )


def decode_sum_(
    wire_WB: Tensor,
    out: Tensor,
    segments: Segments,
    fmt: BlockFormat,
    *,
    alpha: float,
    launch: Launch | None = None,
) -> None:
    device = device_format(fmt)
    launch = launch or decode_launch(device, out.dtype)
    tile = launch.tile(fmt.block_size)
    tiles = tiles_of(segments, fmt.block_size, tile, out.device)
    if tiles.count == 0:
        return
    decode_sum_kernel[(tiles.count,)](
        wire_WB,
        wire_WB.stride(0),
        out,
        tiles.segment_of_tile,
        tiles.rows,
        level_table(fmt, out.device),
        float(alpha),
        SOURCES=wire_WB.shape[0],
        fmt=device,
        TILE=tile,
        VECTOR=launch.vector,
        BYTES=needs_bytes(wire_WB, device, wire_WB.stride(0)),
        num_warps=launch.num_warps,
        enable_fp_fusion=False,
    )
