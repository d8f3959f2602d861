"""Quantisation in C: same bytes as `lowbit_strategy.kernels.reference.blocks`."""

from __future__ import annotations

import ctypes

from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.native import isa, kernels_of, library
from lowbit_strategy.kernels.native.calls import CallStruct, call_struct, extent, format_struct
from lowbit_strategy.kernels.native.threads import run
from lowbit_strategy.kernels.segments import Segments


def _run(name: str, call: CallStruct, segments: Segments, fmt: BlockFormat) -> bool:
    """Call ``lowbit_<name>`` for all blocks; whether something was not finite."""
    kernels, fmt_pointer, call_pointer = kernels_of(isa()), ctypes.byref(format_struct(fmt)), ctypes.byref(call)
    blocks = getattr(library(), f"lowbit_{name}")
    return any(
        run(
            lambda first, last: blocks(kernels, fmt_pointer, call_pointer, first, last),
            extent(segments, fmt).num_blocks,
            fmt.block_size,
        )
    )


def run_encode(call: CallStruct, segments: Segments, fmt: BlockFormat, flag: Tensor) -> None:
    if _run("encode", call, segments, fmt):
        flag |= 1


def encode_(
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    fmt: BlockFormat,
    *,
    stochastic: bool,
    seed: int,
    flag: Tensor,
) -> None:
    call = call_struct(x, wire[None], segments, fmt)
    call.stochastic, call.seed = stochastic, seed & 0xFFFFFFFF
    run_encode(call, segments, fmt, flag)


def decode_sum_(wire_WB: Tensor, out: Tensor, segments: Segments, fmt: BlockFormat, *, alpha: float) -> None:
    call = call_struct(out, wire_WB, segments, fmt)
    call.alpha = alpha
    _run("decode_sum", call, segments, fmt)
