"""Device functions: compensate, quantize, pack and update the residual, each byte read and written once."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from lowbit_strategy.kernels.format import float_bits, uniform
from lowbit_strategy.kernels.reference.rng import RESIDUAL_STREAM as _RESIDUAL_STREAM
from lowbit_strategy.kernels.triton.bits import any_nonzero, as_float32
from lowbit_strategy.kernels.triton.loading import load_parts, load_scale, offsets
from lowbit_strategy.kernels.triton.packing import raise_flag, store_codes, store_scale
from lowbit_strategy.kernels.triton.quantize import inverse, quantize, rounded_int8, scaled, stream_key
from lowbit_strategy.kernels.triton.scales import block_scale, residual_scale
from lowbit_strategy.kernels.triton.tiles import BLOCK, CODES, NUMEL, SALT, SCALES, locate
from lowbit_strategy.kernels.triton.unpacking import add_product

RESIDUAL_STREAM = tl.constexpr(_RESIDUAL_STREAM)
RESIDUAL_QMAX = tl.constexpr(127)
RESIDUAL_INVERSE_QMAX = tl.constexpr(1.0 / 127)
RESIDUAL_MAX_SCALE_BITS = tl.constexpr(float_bits(uniform(8, 128).max_scale))


class StepArguments(NamedTuple):
    """Values that all tiles of a segment share in one step; `zero` is for `nearest_e2m1`."""

    beta_old: tl.tensor
    beta_new: tl.tensor
    reset: tl.tensor
    seed: tl.tensor
    salt: tl.tensor
    zero: tl.tensor
    flag: tl.tensor


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
    step,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """``beta_old * e + beta_new * (h - sent)``; nothing is sent for padding."""
    updated = ()
    for p in tl.static_range(len(values)):
        value = values[p]
        if SIGNED_ZERO and len(fmt.codebook) > 0:
            value = tl.where(usable[:, None], value, 0.0)  # minus a value times 0 would be minus zero
        if not PLAIN:
            at = offsets(fmt.block, fmt, shape) + p * fmt.length
            value = tl.where(at < left, value, 0.0)
        if len(fmt.codebook) == 0 or fmt.e2m1:
            rest = add_product(h[p], value, -scale)  # integers of up to 8 bits times 8 bits
        else:
            rest = h[p] - value * scale[:, None]
        updated = updated + (step.beta_old * e[p] + step.beta_new * rest,)
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
    step,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    how: tl.constexpr,
):
    """Quantize the residual by its own scale. A kept block's bytes stay in memory untouched, unless it is reset."""
    scale = residual_scale(updated, RESIDUAL_INVERSE_QMAX, RESIDUAL_MAX_SCALE_BITS)
    scale_inverse, usable = inverse(scale, RESIDUAL_MAX_SCALE_BITS)
    key = stream_key(step.seed, step.salt, RESIDUAL_STREAM) if how.stochastic_residual else 0
    at = offsets(fmt.block, fmt, shape)
    written = rows & ~keep & usable
    zeroed = rows & tl.where(keep, reset, ~usable)
    for p in tl.static_range(len(updated)):
        place = residual + (at + p * fmt.length)
        y = scaled(updated, p, scale_inverse, first, key, RESIDUAL_QMAX, fmt, shape, how.stochastic_residual)
        value = rounded_int8(y, fmt)
        tl.store(place, value, mask=written[:, None])
        tl.store(place, tl.zeros_like(value), mask=zeroed[:, None])
    store_scale(scale_at, tl.where(keep, old_scale, scale), rows, shape, False)


@triton.jit
def encode_tile(
    x,
    residual,
    residual_scale,
    codes_at,
    scales_at,
    left,
    first,
    done,
    step,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    how: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Encode all blocks of `shape`, starting with block `done`."""
    x += done * fmt.block
    codes_at += done * fmt.code_nbytes
    scales_at += done * 2
    first += done * fmt.block
    if residual is not None:
        residual += done * fmt.block
    if residual_scale is not None:
        residual_scale += done
    K: tl.constexpr = shape.rows
    rows = left - tl.arange(0, shape.rows) * fmt.block > 0
    if residual is None:
        h = as_float32(load_parts(x, left, fmt, shape, PLAIN))
    else:
        reset = (tl.zeros([K], tl.int32) + step.reset) != 0
        loaded = load_parts(x, left, fmt, shape, PLAIN)
        g = as_float32(loaded)
        e, old_scale = load_residual(residual, residual_scale, left, rows, reset, fmt, shape, PLAIN)
        busy = any_nonzero(loaded)  # an idle block sends nothing and keeps its residual
        h = ()
        for p in tl.static_range(len(g)):
            h = h + (g[p] + e[p],)

    scale, finite = block_scale(h, left, fmt, shape, PLAIN)
    if residual is not None:
        scale = tl.where(busy, scale, 0.0)
    codes, values, usable = quantize(h, scale, first, step, fmt, shape, how.stochastic)
    store_codes(codes_at, codes, usable, rows, fmt, shape)
    store_scale(scales_at, scale, rows, shape, fmt.code_nbytes % 2 != 0)
    raise_flag(step.flag, rows & ~finite, shape)

    if residual is not None:
        keep = ~busy | ~finite
        updated = update(h, e, values, scale, usable, left, step, fmt, shape, residual_scale is None, PLAIN)
        if residual_scale is None:
            store_float_residual(residual, updated, keep, rows, reset, fmt, shape)
        else:
            store_int8_residual(
                residual, residual_scale, updated, old_scale, keep, rows, reset, first, step, fmt, shape, how
            )


@triton.jit(do_not_specialize=["seed", "reset"], do_not_specialize_on_alignment=["x", "flag"])
def encode_kernel(
    segment_of_tile,
    segments,
    x,
    residual,
    residual_scale,
    wire,
    flag,
    beta_old,
    beta_new,
    reset,
    seed,
    fmt: tl.constexpr,
    shape: tl.constexpr,
    small: tl.constexpr,
    how: tl.constexpr,
):
    """Encode one tile. With residual None nothing is compensated."""
    TILE: tl.constexpr = shape.rows * fmt.block
    row, tile, start, left, is_plain = locate(segment_of_tile, segments, x, TILE)
    x += start
    block = tl.load(row + BLOCK) + tile * shape.rows
    codes = wire + tl.multiple_of(tl.load(row + CODES), 16) + tile * (shape.rows * fmt.code_nbytes)
    scales = wire + tl.load(row + SCALES) + tile * (shape.rows * 2)
    zero = (tl.load(row + NUMEL) >> 62).to(tl.int32)  # loaded, so that the compiler does not know it
    step = StepArguments(beta_old, beta_new, reset, seed, tl.load(row + SALT), zero, flag)
    first = (tile * TILE).to(tl.int32)
    if residual is not None:
        residual += block * fmt.block
    if residual_scale is not None:
        residual_scale += block
    if is_plain:
        here = tl.multiple_of(x, 16)
        encode_tile(here, residual, residual_scale, codes, scales, TILE, first, 0, step, fmt, shape, how, True)
    else:
        for i in range(shape.rows // small.rows):
            done = i * small.rows
            rest = left - done * fmt.block
            if rest > 0:
                encode_tile(x, residual, residual_scale, codes, scales, rest, first, done, step, fmt, small, how, False)
