"""The LoCo step in plain PyTorch: compensate, quantise, pack, update the residual."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.reference import blocks
from lowbit_strategy.kernels.reference.rng import CODE_STREAM, RESIDUAL_STREAM
from lowbit_strategy.kernels.segments import CACHE_ELEMENTS, Piece, Segments, pieces


def read_residual(residual: Tensor, residual_scale: Tensor | None, piece: Piece, fmt: BlockFormat) -> Tensor:
    """float32 [K, B]."""
    e_KB = residual[piece.state].view(-1, fmt.block_size).float()
    if residual_scale is None:
        return e_KB
    return e_KB * residual_scale[piece.state_blocks].float()[:, None]


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
    max_elements: int = CACHE_ELEMENTS,
) -> None:
    beta_old = torch.tensor(beta, dtype=torch.float32)
    beta_new = torch.tensor(1.0 - beta, dtype=torch.float32)
    for piece in pieces(segments, fmt, max_elements):
        if reset:
            residual[piece.state] = 0
            if residual_scale is not None:
                residual_scale[piece.state_blocks] = 0
        g_KB = blocks.to_blocks(x[piece.x], fmt.block_size)
        e_KB = read_residual(residual, residual_scale, piece, fmt)
        h_KB = g_KB + e_KB

        valid_KB = blocks.valid_mask(piece.x.stop - piece.x.start, fmt, x.device)
        counts_K = valid_KB.sum(-1)
        scale_K, finite_K = blocks.block_scale(h_KB, counts_K, fmt)
        idle_K = (g_KB == 0).all(-1)  # an idle expert's residual waits for its next gradient
        scale_K = torch.where(idle_K, 0.0, scale_K)
        noise = blocks.piece_dither(piece, h_KB, seed, CODE_STREAM) if stochastic else 0.0
        codes_KB = blocks.quantize(h_KB, scale_K, fmt, noise)
        blocks.write_blocks_(wire, piece, codes_KB, scale_K, fmt)
        flag |= (~finite_K.all()).to(flag.dtype)

        sent_KB = torch.where(valid_KB, blocks.dequantize(codes_KB, scale_K, fmt), 0.0)
        updated_KB = beta_old * e_KB + beta_new * (h_KB - sent_KB)
        keep_K = idle_K | ~finite_K
        if residual_scale is None:
            residual[piece.state] = torch.where(keep_K[:, None], e_KB, updated_KB).view(-1)
            continue
        noise = blocks.piece_dither(piece, h_KB, seed, RESIDUAL_STREAM) if stochastic_residual else 0.0
        q_KB, new_scale_K = blocks.quantize_residual(updated_KB, noise)
        old_q_KB, old_scale_K = residual[piece.state].view_as(q_KB), residual_scale[piece.state_blocks].float()
        residual[piece.state] = torch.where(keep_K[:, None], old_q_KB, q_KB).view(-1)
        residual_scale[piece.state_blocks] = blocks.to_bfloat16(torch.where(keep_K, old_scale_K, new_scale_K))
