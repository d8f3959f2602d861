"""The LoCo step on a GPU: compensate, quantise, pack and update the residual, each byte read and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.reference.rng import RESIDUAL_STREAM as _RESIDUAL_STREAM
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.kernels.triton.blocks import int32_of, needs_bytes, quantize, raise_flag
from lowbit_strategy.kernels.triton.common import (
    absmax_scale,
    any_nonzero,
    as_float32,
    block_scale,
    inverse,
    is_plain,
    load_parts,
    locate,
    offsets,
    round_parts,
    rows_left,
    signed_bytes,
    stream_key,
    wire_place,
)
from lowbit_strategy.kernels.triton.layout import device_format, level_table
from lowbit_strategy.kernels.triton.packing import load_scale, store_codes, store_scale
from lowbit_strategy.kernels.triton.tiles import Launch, encode_launch, tiles_of

RESIDUAL_STREAM = tl.constexpr(_RESIDUAL_STREAM)
RESIDUAL_QMAX = tl.constexpr(127)
RESIDUAL_INVERSE_QMAX = tl.constexpr(1.0 / 127)


@triton.jit
def load_residual(
    residual,
    scale_at,
    padded,
    rows,
    reset,
    fmt: tl.constexpr,
    K: tl.constexpr,
    VECTOR: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """E as float32 parts, and the stored scale [K] (zeros for a float32 residual); both 0 on a reset."""
    stored = load_parts(residual, padded, fmt, K, VECTOR, PLAIN)
    e = ()
    if scale_at is None:
        scale = tl.zeros([K], tl.float32)
        for p in tl.static_range(len(stored)):
            e = e + (tl.where(reset[:, None], 0.0, stored[p]),)
    else:
        scale = tl.where(reset, 0.0, load_scale(scale_at, rows, K, False, PLAIN))
        q = signed_bytes(stored)
        for p in tl.static_range(len(q)):
            e = e + (q[p] * scale[:, None],)
    return e, scale


@triton.jit
def update(h, e, values, scale, left, beta_old, beta_new, fmt: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr):
    """``beta_old * e + beta_new * (h - sent)``; nothing is sent for padding."""
    updated = ()
    for p in tl.static_range(len(values)):
        sent = values[p] * scale[:, None]
        if fmt.num_levels > 0:
            sent = sent + 0.0  # a negative level of an empty block is zero, not minus zero
        if not PLAIN:
            at = offsets(fmt.block, K, fmt.length, 1) + p * fmt.length
            sent = tl.where(at < left, sent, 0.0)
        updated = updated + (beta_old * e[p] + beta_new * (h[p] - sent),)
    return updated


@triton.jit
def store_float_residual(
    residual, updated, keep, rows, reset, fmt: tl.constexpr, K: tl.constexpr, VECTOR: tl.constexpr
):
    at = offsets(fmt.block, K, fmt.length, VECTOR)
    for p in tl.static_range(len(updated)):
        place = residual + (at + p * fmt.length)
        tl.store(place, updated[p], mask=(rows & ~keep)[:, None])
        tl.store(place, tl.zeros_like(updated[p]), mask=(rows & keep & reset)[:, None])


@triton.jit
def store_int8_residual(
    residual,
    scale_at,
    updated,
    old_scale,
    keep,
    rows,
    reset,
    first,
    key,
    fmt: tl.constexpr,
    K: tl.constexpr,
    VECTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Quantise the residual by its own scale. A kept block's bytes stay in memory untouched, unless it is reset."""
    scale, _ = absmax_scale(updated, RESIDUAL_INVERSE_QMAX)
    scale_inverse, usable = inverse(scale)
    q, _ = round_parts(updated, scale_inverse, first, key, RESIDUAL_QMAX, fmt, K, STOCHASTIC)
    at = offsets(fmt.block, K, fmt.length, VECTOR)
    written = rows & ~keep & usable
    zeroed = rows & tl.where(keep, reset, ~usable)
    for p in tl.static_range(len(q)):
        place = residual + (at + p * fmt.length)
        value = q[p].to(tl.int8)
        tl.store(place, value, mask=written[:, None])
        tl.store(place, tl.zeros_like(value), mask=zeroed[:, None])
    store_scale(scale_at, tl.where(keep, old_scale, scale), rows, K, False, PLAIN)


@triton.jit
def loco_tile(
    x,
    residual,
    residual_scale,
    codes_at,
    scales_at,
    left,
    first,
    beta_old,
    beta_new,
    reset,
    seed,
    salt,
    table,
    flag,
    fmt: tl.constexpr,
    K: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STOCHASTIC_RESIDUAL: tl.constexpr,
    PLAIN: tl.constexpr,
):
    rows = rows_left(left, fmt.block, K) > 0
    reset = (tl.zeros([K], tl.int32) + reset) != 0
    padded = (left + (fmt.block - 1)) // fmt.block * fmt.block
    g = as_float32(load_parts(x, left, fmt, K, VECTOR, PLAIN))
    e, old_scale = load_residual(residual, residual_scale, padded, rows, reset, fmt, K, VECTOR, PLAIN)
    busy = any_nonzero(g)
    h = ()
    for p in tl.static_range(len(g)):
        h = h + (g[p] + e[p],)

    scale, finite = block_scale(h, left, fmt, K, PLAIN)
    scale = tl.where(busy, scale, 0.0)
    codes, values, usable = quantize(h, scale, first, seed, salt, table, fmt, K, STOCHASTIC)
    store_codes(codes_at, codes, usable, rows, fmt, K, VECTOR, PLAIN)
    store_scale(scales_at, scale, rows, K, BYTES, PLAIN)
    raise_flag(flag, rows & ~finite, K)

    keep = ~busy | ~finite
    updated = update(h, e, values, scale, left, beta_old, beta_new, fmt, K, PLAIN)
    if residual_scale is None:
        store_float_residual(residual, updated, keep, rows, reset, fmt, K, VECTOR)
    else:
        key = stream_key(seed, salt, RESIDUAL_STREAM) if STOCHASTIC_RESIDUAL else 0
        store_int8_residual(
            residual,
            residual_scale,
            updated,
            old_scale,
            keep,
            rows,
            reset,
            first,
            key,
            fmt,
            K,
            VECTOR,
            STOCHASTIC_RESIDUAL,
            PLAIN,
        )


@triton.jit(do_not_specialize=["seed", "reset"], do_not_specialize_on_alignment=["x"])
def loco_kernel(
    x,
    residual,
    residual_scale,
    wire,
    segment_of_tile,
    segments,
    table,
    flag,
    beta_old,
    beta_new,
    reset,
    seed,
    fmt: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STOCHASTIC_RESIDUAL: tl.constexpr,
):
    K: tl.constexpr = TILE // fmt.block
    row, start = locate(segment_of_tile, segments, TILE)
    codes, scales, left = wire_place(row, start, fmt, TILE)
    here = x + (tl.load(row) + start)
    state = tl.multiple_of(tl.load(row + 2), 32) + start
    salt = tl.load(row + 4)
    residual_at = residual + state
    if residual_scale is None:
        residual_scale_at = None
    else:
        residual_scale_at = residual_scale + state // fmt.block
    if is_plain(here, left, TILE):
        here = tl.multiple_of(here, 16)
        loco_tile(
            here,
            residual_at,
            residual_scale_at,
            wire + codes,
            wire + scales,
            left,
            start,
            beta_old,
            beta_new,
            reset,
            seed,
            salt,
            table,
            flag,
            fmt,
            K,
            VECTOR,
            BYTES,
            STOCHASTIC,
            STOCHASTIC_RESIDUAL,
            True,
        )
    else:
        loco_tile(
            here,
            residual_at,
            residual_scale_at,
            wire + codes,
            wire + scales,
            left,
            start,
            beta_old,
            beta_new,
            reset,
            seed,
            salt,
            table,
            flag,
            fmt,
            K,
            VECTOR,
            BYTES,
            STOCHASTIC,
            STOCHASTIC_RESIDUAL,
            False,
        )


def loco_encode_(
    x: Tensor,
    residual: Tensor,
    residual_scale: Tensor | None,
    wire: Tensor,
    segments: Segments,
    fmt: BlockFormat,
    *,
    beta: float,
    reset: bool,
    stochastic: bool,
    stochastic_residual: bool,
    seed: int,
    flag: Tensor,
    launch: Launch | None = None,
) -> None:
    device = device_format(fmt)
    launch = launch or encode_launch(device, x.dtype, residual.dtype)
    tile = launch.tile(fmt.block_size)
    tiles = tiles_of(segments, fmt.block_size, tile, x.device)
    if tiles.count == 0:
        return
    loco_kernel[(tiles.count,)](
        x,
        residual,
        residual_scale,
        wire,
        tiles.segment_of_tile,
        tiles.rows,
        level_table(fmt, x.device),
        flag,
        float(beta),
        1.0 - beta,
        int(reset),
        int32_of(seed),
        fmt=device,
        TILE=tile,
        VECTOR=launch.vector,
        BYTES=needs_bytes(wire, device),
        STOCHASTIC=stochastic,
        STOCHASTIC_RESIDUAL=stochastic_residual and residual_scale is not None,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,
    )
