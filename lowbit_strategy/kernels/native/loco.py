"""The LoCo step in C: same bytes as `lowbit_strategy.kernels.reference.loco`."""

from __future__ import annotations

from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.native.blocks import run_encode
from lowbit_strategy.kernels.native.calls import call_struct, set_residual
from lowbit_strategy.kernels.segments import Segments


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
) -> None:
    call = call_struct(x, wire[None], segments, fmt)
    set_residual(call, residual, residual_scale, segments, fmt)
    call.beta_old, call.beta_new = beta, 1.0 - beta
    call.reset, call.stochastic, call.stochastic_residual = reset, stochastic, stochastic_residual
    call.seed = seed & 0xFFFFFFFF
    run_encode(call, segments, fmt, flag)
