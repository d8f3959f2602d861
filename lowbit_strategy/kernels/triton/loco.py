"""The LoCo step on a GPU: compensate, quantise, pack and update the residual, each byte read and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat, uniform
from lowbit_strategy.kernels.reference.rng import RESIDUAL_STREAM as _RESIDUAL_STREAM
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.kernels.triton.blocks import int32_of, needs_bytes
from lowbit_strategy.kernels.triton.device_functions import (
    ahead,
    any_nonzero,
    as_float32,
    bits_of,
    elements_in_rows,
    is_plain,
    load_parts,
    locate,
    offsets,
)
from lowbit_strategy.kernels.triton.layout import codebook_table, device_format, float_bits
from lowbit_strategy.kernels.triton.packing import load_scale, raise_flag, store_codes, store_scale
from lowbit_strategy.kernels.triton.rounding import quantize, round_parts, stream_key
from lowbit_strategy.kernels.triton.scales import block_scale, inverse, residual_scale
from lowbit_strategy.kernels.triton.tiles import Launch, encode_launch, on, tiles_of

RESIDUAL_STREAM = tl.constexpr(_RESIDUAL_STREAM)
RESIDUAL_QMAX = tl.constexpr(127)
RESIDUAL_INVERSE_QMAX = tl.constexpr(1.0 / 127)
RESIDUAL_MAX_SCALE_BITS = tl.constexpr(float_bits(uniform(8, 128).max_scale))


@triton.jit
def load_residual(residual, scale_at, left, rows, reset, fmt: tl.constexpr, shape: tl.constexpr, PLAIN: tl.constexpr):
    """E as float32 parts, and the stored scale [rows] (zeros for a float32 residual); both 0 on a reset."""
    K: tl.constexpr = shape.rows
    padded = (left + (fmt.block - 1)) // fmt.block * fmt.block
    stored = as_float32(load_parts(residual, padded, fmt, shape, PLAIN))
    e = ()
    if scale_at is None:
        scale = tl.zeros([K], tl.float32)
        for p in tl.static_range(len(stored)):
            e = e + (tl.where(reset[:, None], 0.0, stored[p]),)
    else:
        scale = tl.where(reset, 0.0, load_scale(scale_at, rows, shape, False, PLAIN))
        for p in tl.static_range(len(stored)):
            e = e + (stored[p] * scale[:, None],)
    return e, scale


@triton.jit
def update(
    h,
    e,
    values,
    scale,
    usable,
    left,
    beta_old,
    beta_new,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """``beta_old * e + beta_new * (h - sent)``; nothing is sent for padding."""
    updated = ()
    for p in tl.static_range(len(values)):
        value = values[p]
        if SIGNED_ZERO and fmt.codebook_size > 0:
            value = tl.where(usable[:, None], value, 0.0)  # minus a value times 0 would be minus zero
        if not PLAIN:
            at = offsets(fmt.block, fmt, shape) + p * fmt.length
            value = tl.where(at < left, value, 0.0)
        rest = h[p] - value * scale[:, None]
        updated = updated + (beta_old * e[p] + beta_new * rest,)
    return updated


@triton.jit
def store_float_residual(residual, updated, keep, rows, reset, fmt: tl.constexpr, shape: tl.constexpr):
    at = offsets(fmt.block, fmt, shape)
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
    shape: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Quantise the residual by its own scale. A kept block's bytes stay in memory untouched, unless it is reset."""
    scale = residual_scale(updated, RESIDUAL_INVERSE_QMAX, RESIDUAL_MAX_SCALE_BITS)
    scale_inverse, usable = inverse(scale)
    q = round_parts(updated, scale_inverse, first, key, RESIDUAL_QMAX, fmt, shape, STOCHASTIC)
    at = offsets(fmt.block, fmt, shape)
    written = rows & ~keep & usable
    zeroed = rows & tl.where(keep, reset, ~usable)
    for p in tl.static_range(len(q)):
        place = residual + (at + p * fmt.length)
        value = bits_of(q[p]).to(tl.int8)  # the low byte
        tl.store(place, value, mask=written[:, None])
        tl.store(place, tl.zeros_like(value), mask=zeroed[:, None])
    store_scale(scale_at, tl.where(keep, old_scale, scale), rows, shape, False)


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
    shape: tl.constexpr,
    BYTES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STOCHASTIC_RESIDUAL: tl.constexpr,
    PLAIN: tl.constexpr,
):
    K: tl.constexpr = shape.rows
    rows = elements_in_rows(left, fmt, shape) > 0
    reset = (tl.zeros([K], tl.int32) + reset) != 0
    g = as_float32(load_parts(x, left, fmt, shape, PLAIN))
    e, old_scale = load_residual(residual, residual_scale, left, rows, reset, fmt, shape, PLAIN)
    busy = any_nonzero(g)  # an idle block sends nothing and keeps its residual
    h = ()
    for p in tl.static_range(len(g)):
        h = h + (g[p] + e[p],)

    scale, finite = block_scale(h, left, fmt, shape, PLAIN)
    scale = tl.where(busy, scale, 0.0)
    codes, values, usable = quantize(h, scale, first, seed, salt, table, fmt, shape, STOCHASTIC)
    store_codes(codes_at, codes, usable, rows, fmt, shape)
    store_scale(scales_at, scale, rows, shape, BYTES)
    raise_flag(flag, rows & ~finite, shape)

    keep = ~busy | ~finite
    updated = update(h, e, values, scale, usable, left, beta_old, beta_new, fmt, shape, residual_scale is None, PLAIN)
    if residual_scale is None:
        store_float_residual(residual, updated, keep, rows, reset, fmt, shape)
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
            shape,
            STOCHASTIC_RESIDUAL,
        )


@triton.jit(do_not_specialize=["seed", "reset"], do_not_specialize_on_alignment=["x", "flag"])
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
    shape: tl.constexpr,
    small: tl.constexpr,
    BYTES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STOCHASTIC_RESIDUAL: tl.constexpr,
):
    TILE: tl.constexpr = shape.rows * fmt.block
    row, tile, left = locate(segment_of_tile, segments, TILE)
    place = ahead(tl.load(row), tile, TILE)
    block = ahead(tl.load(row + 1), tile, shape.rows)
    codes_at = ahead(wire + tl.multiple_of(tl.load(row + 2), 16), tile, shape.rows * fmt.code_nbytes)
    scales_at = ahead(wire + tl.load(row + 3), tile, shape.rows * 2)
    salt = tl.load(row + 6)
    first = tile * TILE
    if is_plain(x + place, left, TILE):
        loco_tile(
            tl.multiple_of(x + place, 16),
            residual + block * fmt.block,
            None if residual_scale is None else residual_scale + block,
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
            fmt,
            shape,
            BYTES,
            STOCHASTIC,
            STOCHASTIC_RESIDUAL,
            True,
        )
    else:
        for i in range(shape.rows // small.rows):
            step = i * (small.rows * fmt.block)
            if left > step:
                loco_tile(
                    x + place + step,
                    residual + (block + i * small.rows) * fmt.block,
                    None if residual_scale is None else residual_scale + (block + i * small.rows),
                    codes_at + i * (small.rows * fmt.code_nbytes),
                    scales_at + i * (small.rows * 2),
                    left - step,
                    first + step,
                    beta_old,
                    beta_new,
                    reset,
                    seed,
                    salt,
                    table,
                    flag,
                    fmt,
                    small,
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
    dithered = stochastic_residual and residual_scale is not None
    launch = launch or encode_launch(device, residual.dtype, dithered=dithered)
    tiles = tiles_of(segments, fmt, launch.tile(fmt.block_size), x.device)
    if tiles.count == 0:
        return
    shape, small = launch.shapes(device)
    with on(x.device):
        loco_kernel[(tiles.count,)](
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
            BYTES=needs_bytes(wire, device),
            STOCHASTIC=stochastic,
            STOCHASTIC_RESIDUAL=dithered,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )
