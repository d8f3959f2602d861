"""Blockwise quantization in plain PyTorch, the bit-exact definition of the wire. It is never optimized.

Legend: ``_KB`` K blocks of B elements; ``_K`` one number per block; ``_C`` packed bytes of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat, uniform
from lowbit_strategy.kernels.integers import Digits, Planes
from lowbit_strategy.kernels.reference.rng import CODE_STREAM, RESIDUAL_STREAM, dither, stream_key
from lowbit_strategy.kernels.segments import CACHE_ELEMENTS, Run, Segments, runs

_FLT_MIN = torch.finfo(torch.float32).tiny
_TRITS = Digits(per_byte=5, base=3)
_RESIDUAL_GRID = uniform(8, 128)  # for blocks of any size


def to_blocks(x_N: Tensor, block_size: int) -> Tensor:
    """float32 [K, B], padded with zeros."""
    pad = -x_N.numel() % block_size
    return torch.nn.functional.pad(x_N.float(), (0, pad)).view(-1, block_size)


def round_up_bfloat16(x: Tensor) -> Tensor:
    """The smallest bfloat16 not below x, as float32, for x >= 0, so that codes of a block never exceed their range."""
    return ((x.contiguous().view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def tree_sum(x_KB: Tensor) -> Tensor:
    """Sum over the last dim by adding halves, so that every backend adds in the same order."""
    while x_KB.shape[-1] > 1:
        half = x_KB.shape[-1] // 2
        x_KB = x_KB[..., :half] + x_KB[..., half:]
    return x_KB[..., 0]


def raw_scale(h_KB: Tensor, counts_K: Tensor, fmt: BlockFormat) -> Tensor:
    """float32 [K] before rounding. `counts_K`: elements of each block that are not padding."""
    magnitude_KB = h_KB.abs()
    absmax_K = magnitude_KB.amax(-1)
    if fmt.scale_rule == "absmax":
        return absmax_K * torch.tensor(1.0 / fmt.top, dtype=torch.float32)
    if fmt.scale_rule == "rms":  # by a power of two near absmax, so that squares neither overflow nor vanish
        exponent = torch.frexp(absmax_K).exponent.clamp(-120, 120)
        unit_KB = torch.ldexp(h_KB, -exponent[:, None])
        mean_K = tree_sum(unit_KB * unit_KB) / counts_K
        return torch.ldexp(mean_K.double().sqrt().float(), exponent)  # rounded once, which the float32 sqrt is not
    return tree_sum(magnitude_KB) / counts_K


def block_scale(h_KB: Tensor, counts_K: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """Scale of each block, float32 [K] holding bfloat16 values, and whether the block is finite, bool [K].

    Below the smallest normal number the scale is 0 (the block decodes to zeros); a block with a non-finite element, or
    so large that a value would overflow, has scale NaN (the block decodes to NaN on every rank).
    """
    finite_K = torch.isfinite(h_KB).all(-1)
    scale_K = round_up_bfloat16(raw_scale(torch.where(finite_K[:, None], h_KB, 0.0), counts_K, fmt))
    finite_K = finite_K & (scale_K <= fmt.max_scale)
    scale_K = torch.where(scale_K < _FLT_MIN, 0.0, scale_K)
    return torch.where(finite_K, scale_K, torch.nan), finite_K


def quantize(h_KB: Tensor, scale_K: Tensor, fmt: BlockFormat, dither_KB: Tensor | float = 0.0) -> Tensor:
    """Codes, uint8 [K, B]. Blocks of scale 0 or NaN get the zero code."""
    usable_K = scale_K > 0
    inverse_K = torch.where(usable_K, 1.0 / scale_K, 0.0)
    y_KB = torch.where(usable_K[:, None], h_KB, 0.0) * inverse_K[:, None]
    if fmt.is_uniform:
        codes_KB = (y_KB + dither_KB).round().clamp(-fmt.qmax, fmt.qmax) + fmt.qmax
    else:
        codes_KB = torch.stack([y_KB > threshold for threshold in fmt.thresholds]).sum(0).to(torch.float32)
    return torch.where(usable_K[:, None], codes_KB, float(fmt.zero_code)).to(torch.uint8)


def quantize_residual(e_KB: Tensor, dither_KB: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """A residual in 8 bits: int8 [K, B], and the scale of each block, float32 [K] holding bfloat16 values; never NaN.

    Residuals are finite: the largest ones lose their last bits instead of overflowing.
    """
    grid = _RESIDUAL_GRID
    raw_K = e_KB.abs().amax(-1) * torch.tensor(1.0 / grid.qmax, dtype=torch.float32)
    scale_K = round_up_bfloat16(raw_K).clamp(max=grid.max_scale)
    scale_K = torch.where(scale_K < _FLT_MIN, 0.0, scale_K)
    codes_KB = quantize(e_KB, scale_K, grid, dither_KB)
    return (codes_KB.to(torch.int16) - grid.qmax).to(torch.int8), scale_K


def dequantize(codes_KB: Tensor, scale_K: Tensor, fmt: BlockFormat) -> Tensor:
    """float32 [K, B]; exact, since a value has at most 16 significant bits and a scale 8."""
    if fmt.codebook is None:
        values_KB = codes_KB.float() - fmt.qmax
    else:
        values_KB = torch.tensor(fmt.codebook, dtype=torch.float32, device=codes_KB.device)[codes_KB.long()]
    return values_KB * scale_K[:, None]


def pack(codes_KB: Tensor, fmt: BlockFormat) -> Tensor:
    """uint8 [K, C], as `lowbit_strategy.kernels.integers` packs."""
    if fmt.is_ternary:
        padding = (0, _TRITS.per_byte * fmt.code_nbytes - fmt.block_size)
        return _TRITS.pack(torch.nn.functional.pad(codes_KB, padding, value=fmt.zero_code))
    return Planes(fmt.planes).pack(codes_KB)


def unpack(packed_KC: Tensor, fmt: BlockFormat) -> Tensor:
    """Codes, uint8 [K, B]: the inverse of `pack`."""
    if fmt.is_ternary:
        return _TRITS.unpack(packed_KC)[:, : fmt.block_size]
    return Planes(fmt.planes).unpack(packed_KC)


def valid_mask(numel: int, fmt: BlockFormat, device: torch.device) -> Tensor:
    """Bool [K, B]: False on the padding of the last block."""
    padded = fmt.num_blocks(numel) * fmt.block_size
    return (torch.arange(padded, device=device) < numel).view(-1, fmt.block_size)


def to_bfloat16(scale_K: Tensor) -> Tensor:
    """Convert float32 scales that already are bfloat16 values, by bits, since a cast's NaN differs between CPUs."""
    return (scale_K.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def write_blocks_(wire: Tensor, run: Run, codes_KB: Tensor, scale_K: Tensor, fmt: BlockFormat) -> None:
    wire[run.codes] = pack(codes_KB, fmt).view(-1)
    wire[run.scales] = to_bfloat16(scale_K).view(torch.uint8)


def read_blocks(wire: Tensor, run: Run, fmt: BlockFormat) -> Tensor:
    """float32 [K, B]: one run of one source."""
    codes_KB = unpack(wire[run.codes].view(-1, fmt.code_nbytes), fmt)
    scale_K = wire[run.scales].clone().view(torch.bfloat16).float()
    return dequantize(codes_KB, scale_K, fmt)


def run_dither(run: Run, like_KB: Tensor, seed: int, stream: int) -> Tensor:
    key = stream_key(seed, run.salt, stream)
    return dither(run.first_element, like_KB.numel(), key, like_KB.device).view_as(like_KB)


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
    max_elements: int = CACHE_ELEMENTS,
) -> None:
    """Quantize and pack; with feedback the LoCo step: compensate, quantize, pack, update the residual."""
    for run in runs(segments, fmt, max_elements):
        g_KB = h_KB = to_blocks(x[run.x], fmt.block_size)
        if feedback is not None:
            e_KB = read_residual(feedback, run, fmt)
            h_KB = g_KB + e_KB
        valid_KB = valid_mask(run.x.stop - run.x.start, fmt, x.device)
        scale_K, finite_K = block_scale(h_KB, valid_KB.sum(-1), fmt)
        idle_K = (g_KB == 0).all(-1)  # an idle expert's residual waits for its next gradient
        scale_K = torch.where(idle_K, 0.0, scale_K)
        noise = run_dither(run, h_KB, seed, CODE_STREAM) if stochastic else 0.0
        codes_KB = quantize(h_KB, scale_K, fmt, noise)
        write_blocks_(wire, run, codes_KB, scale_K, fmt)
        flag |= (~finite_K.all()).to(flag.dtype)
        if feedback is not None:
            missed_KB = h_KB - torch.where(valid_KB, dequantize(codes_KB, scale_K, fmt), 0.0)
            update_residual_(feedback, run, e_KB, missed_KB, idle_K | ~finite_K, seed)


def read_residual(feedback: Feedback, run: Run, fmt: BlockFormat) -> Tensor:
    """float32 [K, B], after a reset if there is one."""
    residual, residual_scale = feedback.residual, feedback.residual_scale
    if feedback.reset:
        residual[run.state] = 0
        if residual_scale is not None:
            residual_scale[run.state_blocks] = 0
    e_KB = residual[run.state].view(-1, fmt.block_size).float()
    if residual_scale is None:
        return e_KB
    return e_KB * residual_scale[run.state_blocks].float()[:, None]


def update_residual_(feedback: Feedback, run: Run, e_KB: Tensor, missed_KB: Tensor, keep_K: Tensor, seed: int) -> None:
    """``e' = beta * e + (1 - beta) * missed``, except in kept blocks."""
    residual, residual_scale = feedback.residual, feedback.residual_scale
    beta_old = torch.tensor(feedback.beta, dtype=torch.float32)
    beta_new = torch.tensor(1.0 - feedback.beta, dtype=torch.float32)
    updated_KB = beta_old * e_KB + beta_new * missed_KB
    if residual_scale is None:
        residual[run.state] = torch.where(keep_K[:, None], e_KB, updated_KB).view(-1)
        return
    noise = run_dither(run, e_KB, seed, RESIDUAL_STREAM) if feedback.stochastic else 0.0
    q_KB, new_scale_K = quantize_residual(updated_KB, noise)
    old_q_KB, old_scale_K = residual[run.state].view_as(q_KB), residual_scale[run.state_blocks].float()
    residual[run.state] = torch.where(keep_K[:, None], old_q_KB, q_KB).view(-1)
    residual_scale[run.state_blocks] = to_bfloat16(torch.where(keep_K, old_scale_K, new_scale_K))


def decode_sum_(
    wire_WB: Tensor,
    out: Tensor,
    segments: Segments,
    fmt: BlockFormat,
    *,
    alpha: float,
    max_elements: int = CACHE_ELEMENTS,
) -> None:
    for run in runs(segments, fmt, max_elements):
        total_KB = torch.zeros(1, dtype=torch.float32, device=out.device)
        for source in wire_WB:  # rank order, float32: the same bits everywhere
            total_KB = total_KB + read_blocks(source, run, fmt)
        numel = run.x.stop - run.x.start
        out[run.x] = (total_KB.view(-1)[:numel] * alpha).to(out.dtype)
