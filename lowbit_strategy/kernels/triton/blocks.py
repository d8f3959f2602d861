"""Blockwise quantisation on a GPU: encode, and decode with the sum over sources."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.loco import Feedback
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.kernels.triton.device_functions import ahead, elements_in_rows, is_plain, locate, offsets
from lowbit_strategy.kernels.triton.encode import How, encode_kernel
from lowbit_strategy.kernels.triton.layout import DeviceFormat, codebook_table, device_format
from lowbit_strategy.kernels.triton.packing import load_scale
from lowbit_strategy.kernels.triton.tiles import Launch, decode_launch, encode_launch, on, tiles_of
from lowbit_strategy.kernels.triton.unpacking import BYTE_BITS, add_source, load_bytes

SOURCES_AT_ONCE = tl.constexpr(8)  # loads in flight before the first is used


def loops_of(sources: int) -> dict[str, int]:
    """How many sources are added in code without a loop, and how many groups and single ones by loops at run time.

    Beyond a group there are loops alone: one compiled kernel serves every number of ranks.
    """
    if sources <= SOURCES_AT_ONCE.value:
        return {"groups": 0, "singles": 0, "UNROLLED": sources}
    groups, singles = divmod(sources, SOURCES_AT_ONCE.value)
    return {"groups": groups, "singles": singles, "UNROLLED": 0}


@triton.jit
def add_sources(
    totals,
    codes_at,
    scales_at,
    stride,
    rows,
    table,
    byte_bits,
    NUM: tl.constexpr,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    BYTES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Totals + source 0 + source 1 ..., in this order; every load is issued before the first is used."""
    packed, scales = (), ()
    for s in tl.static_range(NUM):
        packed = packed + (load_bytes(codes_at + stride * s, rows, fmt, shape, PLAIN),)
        scales = scales + (load_scale(scales_at + stride * s, rows, shape, BYTES, PLAIN),)
    for s in tl.static_range(NUM):
        totals = add_source(totals, packed[s], scales[s], table, byte_bits, fmt)
    return totals


@triton.jit
def decode_tile(
    codes_at,
    scales_at,
    stride,
    out,
    left,
    alpha,
    table,
    groups,
    singles,
    UNROLLED: tl.constexpr,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    BYTES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    PARTS: tl.constexpr = fmt.parts
    K: tl.constexpr = shape.rows
    L: tl.constexpr = fmt.length
    rows = elements_in_rows(left, fmt, shape) > 0
    byte_bits = BYTE_BITS + (stride >> 62).to(tl.int32)  # the same, but unknown to the compiler: see grid_value
    totals = ()
    for _ in tl.static_range(PARTS):
        totals = totals + (tl.zeros([K, L], tl.float32),)
    if UNROLLED:
        totals = add_sources(
            totals, codes_at, scales_at, stride, rows, table, byte_bits, UNROLLED, fmt, shape, BYTES, PLAIN
        )
    else:
        for _ in tl.range(groups, num_stages=1):
            totals = add_sources(
                totals, codes_at, scales_at, stride, rows, table, byte_bits, SOURCES_AT_ONCE, fmt, shape, BYTES, PLAIN
            )
            codes_at += stride * SOURCES_AT_ONCE
            scales_at += stride * SOURCES_AT_ONCE
        for _ in tl.range(singles, num_stages=1):
            totals = add_sources(
                totals, codes_at, scales_at, stride, rows, table, byte_bits, 1, fmt, shape, BYTES, PLAIN
            )
            codes_at += stride
            scales_at += stride
    at = offsets(fmt.block, fmt, shape)
    for p in tl.static_range(PARTS):
        place = at + p * fmt.length
        value = (totals[p] * alpha).to(out.dtype.element_ty)
        if PLAIN:
            tl.store(out + place, value)
        else:
            tl.store(out + place, value, mask=place < left)


@triton.jit(do_not_specialize=["groups", "singles"], do_not_specialize_on_alignment=["out"])
def decode_sum_kernel(
    wire,
    stride,
    out,
    segment_of_tile,
    segments,
    table,
    alpha,
    groups,
    singles,
    UNROLLED: tl.constexpr,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    small: tl.constexpr,
    BYTES: tl.constexpr,
):
    TILE: tl.constexpr = shape.rows * fmt.block
    row, tile, left = locate(segment_of_tile, segments, TILE)
    place = ahead(tl.load(row), tile, TILE)
    codes_at = ahead(wire + tl.multiple_of(tl.load(row + 2), 16), tile, shape.rows * fmt.code_nbytes)
    scales_at = ahead(wire + tl.load(row + 3), tile, shape.rows * 2)
    stride = stride.to(tl.int64)
    if is_plain(out + place, left, TILE):
        here = tl.multiple_of(out + place, 16)
        decode_tile(
            codes_at, scales_at, stride, here, left, alpha, table, groups, singles, UNROLLED, fmt, shape, BYTES, True
        )
    else:
        for i in range(shape.rows // small.rows):
            step = i * (small.rows * fmt.block)
            if left > step:
                decode_tile(
                    codes_at + i * (small.rows * fmt.code_nbytes),
                    scales_at + i * (small.rows * 2),
                    stride,
                    out + place + step,
                    left - step,
                    alpha,
                    table,
                    groups,
                    singles,
                    UNROLLED,
                    fmt,
                    small,
                    BYTES,
                    False,
                )


def int32_of(seed: int) -> int:
    """The same 32 bits, so that the argument's type (and with it the compiled kernel) never changes."""
    return (seed & 0xFFFFFFFF) - ((seed & 0x80000000) << 1)


def needs_bytes(wire: Tensor, fmt: DeviceFormat, stride: int = 0) -> bool:
    """Whether scales may lie at odd addresses."""
    return bool(fmt.code_nbytes % 2 or wire.data_ptr() % 2 or stride % 2)


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
    device = device_format(fmt)
    residual, residual_scale, beta, reset, dithered = feedback or (None, None, 0.0, False, False)
    dithered = dithered and residual_scale is not None
    launch = launch or encode_launch(device, None if residual is None else residual.dtype, dithered=dithered)
    tiles = tiles_of(segments, fmt, launch.tile(fmt.block_size), x.device)
    if tiles.count == 0:
        return
    shape, small = launch.shapes(device)
    with on(x.device):
        encode_kernel[(tiles.count,)](
            x,
            residual,
            residual_scale,
            wire,
            tiles.segment_of_tile,
            tiles.rows,
            codebook_table(fmt, x.device),
            flag,
            float(beta),
            1.0 - beta,
            int(reset),
            int32_of(seed),
            fmt=device,
            shape=shape,
            small=small,
            how=How(needs_bytes(wire, device), stochastic, dithered),
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
    launch = launch or decode_launch(device)
    tiles = tiles_of(segments, fmt, launch.tile(fmt.block_size), out.device)
    if tiles.count == 0:
        return
    shape, small = launch.shapes(device)
    with on(out.device):
        decode_sum_kernel[(tiles.count,)](
            wire_WB,
            wire_WB.stride(0),
            out,
            tiles.segment_of_tile,
            tiles.rows,
            codebook_table(fmt, out.device),
            float(alpha),
            **loops_of(wire_WB.shape[0]),
            fmt=device,
            shape=shape,
            small=small,
            BYTES=needs_bytes(wire_WB, device, wire_WB.stride(0)),
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )
