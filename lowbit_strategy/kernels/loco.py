"""The LoCo step, one pass over memory: the public op."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.kernels import backends
from lowbit_strategy.kernels.blocks import check_buffers
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.segments import Segments


class Feedback(NamedTuple):
    """A residual and how a step updates it; fields as the arguments of `loco_encode_`."""

    residual: Tensor
    residual_scale: Tensor | None
    beta: float
    reset: bool = False
    stochastic: bool = False


def loco_encode_(
    x: Tensor,
    residual: Tensor,
    residual_scale: Tensor | None,
    wire: Tensor,
    segments: Segments,
    fmt: BlockFormat,
    *,
    beta: float,
    flag: Tensor,
    reset: bool = False,
    stochastic: bool = False,
    stochastic_residual: bool = False,
    seed: int = 0,
) -> None:
    """Compensate, quantise, pack and update the residual in place.

    For each block, all in float32:

    1. ``h = g + e``, with ``e`` the dequantised residual (0 if `reset`)
    2. codes and scale of ``h`` as `fmt` says, packed into `wire`; ``Q`` is what they decode to
    3. ``e' = beta * e + (1 - beta) * (h - Q)``, stored as int8 with one absmax scale per block

    A block whose gradient is all zero is idle: it sends zeros and keeps its residual (an idle expert's feedback is
    not spent on a step whose result is not read). A block with inf or NaN in ``h`` sends NaN and keeps its residual.

    Args:
        x: Gradients, float32, bfloat16 or float16, 1-D contiguous.
        residual: int8 with `residual_scale`, or float32 without; 1-D, whole blocks. Updated in place.
        residual_scale: bfloat16, one per block of `residual`. Updated in place.
        wire: uint8, 1-D contiguous; written at each segment's ``wire_offset``.
        segments: Which pieces.
        fmt: Codebook or uniform grid, scale rule and block size.
        beta: Weight of the old error, in [0, 1). 0 is classic error feedback.
        flag: int32 [1], set to 1 if any block is not finite.
        reset: Forget the residual before this step.
        stochastic: Round codes at random without bias; uniform grids only.
        stochastic_residual: Round the int8 residual at random, so that increments below half a step are not lost.
        seed: 32 bits, private to the rank and the step.

    References:
        Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", 2024, arXiv 2407.04480.
    """
    check_buffers(x, wire)
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must be in [0, 1), got {beta}")
    if (residual.dtype == torch.int8) != (residual_scale is not None):
        raise TypeError("an int8 residual needs a residual_scale, a float32 residual has none")
    if stochastic and not fmt.is_uniform:
        raise ValueError("stochastic rounding of codes needs the uniform grid: use rounding='nearest'")
    feedback = Feedback(residual, residual_scale, beta, reset, stochastic_residual)
    backends.implementation("blocks", x.device).encode_(
        x, wire, segments, fmt, stochastic=stochastic, seed=seed, flag=flag, feedback=feedback
    )
