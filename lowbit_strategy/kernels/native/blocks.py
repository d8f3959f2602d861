"""Quantisation in C, and floats that are sent as they are: same bytes as `lowbit_strategy.kernels.reference`."""

from __future__ import annotations

import ctypes

from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat, DenseFormat
from lowbit_strategy.kernels.loco import Feedback
from lowbit_strategy.kernels.native import isa, kernels_of
from lowbit_strategy.kernels.native.calls import CallStruct, call_struct, extent, set_residual
from lowbit_strategy.kernels.native.functions import function
from lowbit_strategy.kernels.native.threads import run
from lowbit_strategy.kernels.segments import Segments


def _run(name: str, call: CallStruct, segments: Segments, fmt: BlockFormat | DenseFormat) -> bool:
    """Call a function of the library for all blocks; whether something was not finite."""
    work, kernels, pointer = function(name), kernels_of(isa()), ctypes.byref(call)
    return any(
        run(
            lambda first, last: work(kernels, pointer, first, last),
            extent(segments, fmt).num_blocks,
            fmt.block_size,
        )
    )


def encode_(
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    fmt: BlockFormat | DenseFormat,
    *,
    flag: Tensor,
    stochastic: bool = False,
    seed: int = 0,
    feedback: Feedback | None = None,
) -> None:
    call = call_struct(x, wire[None], segments, fmt)
    call.stochastic, call.seed = stochastic, seed & 0xFFFFFFFF
    if feedback is not None:
        set_residual(call, feedback, segments, fmt)
    if _run("lowbit_encode", call, segments, fmt):
        flag |= 1


def decode_sum_(
    wire_WB: Tensor, out: Tensor, segments: Segments, fmt: BlockFormat | DenseFormat, *, alpha: float
) -> None:
    call = call_struct(out, wire_WB, segments, fmt)
    call.alpha = alpha
    _run("lowbit_decode_sum", call, segments, fmt)
