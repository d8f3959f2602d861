"""Quantisation in C, for blocks and for matrices with scales of rows times columns.

Same bytes as `lowbit_strategy.kernels.reference.blocks` and `lowbit_strategy.kernels.reference.rank1`.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from lowbit_strategy.kernels.format import Rank1Format, ScaledFormat
from lowbit_strategy.kernels.native import isa, kernels_of, library
from lowbit_strategy.kernels.native.calls import CallStruct, call_struct, extent, format_struct
from lowbit_strategy.kernels.native.threads import run
from lowbit_strategy.kernels.segments import Segments


def _run(name: str, call: CallStruct, segments: Segments, fmt: ScaledFormat) -> bool:
    """Call ``lowbit_<name>`` for all blocks, or all matrices; whether something was not finite."""
    kernels, fmt_pointer, call_pointer = kernels_of(isa()), ctypes.byref(format_struct(fmt.codes)), ctypes.byref(call)
    num_blocks = extent(segments, fmt).num_blocks
    if isinstance(fmt, Rank1Format):
        matrices, columns = getattr(library(), f"lowbit_rank1_{name}"), fmt.columns
        mean_numel = num_blocks * columns // max(len(segments), 1)
        results = run(
            lambda first, last: matrices(kernels, fmt_pointer, call_pointer, columns, first, last),
            len(segments),
            mean_numel,
        )
        if min(results) < 0:
            raise MemoryError(f"no memory for the rows of a matrix with {columns} columns")
        return any(results)
    blocks = getattr(library(), f"lowbit_{name}")
    return any(
        run(lambda first, last: blocks(kernels, fmt_pointer, call_pointer, first, last), num_blocks, fmt.block_size)
    )


def run_encode(call: CallStruct, segments: Segments, fmt: ScaledFormat, flag: Tensor) -> None:
    if _run("encode", call, segments, fmt):
        flag |= 1


def encode_(
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    fmt: ScaledFormat,
    *,
    stochastic: bool,
    seed: int,
    flag: Tensor,
) -> None:
    call = call_struct(x, wire[None], segments, fmt)
    call.stochastic, call.seed = stochastic, seed & 0xFFFFFFFF
    run_encode(call, segments, fmt, flag)


def decode_sum_(wire_WB: Tensor, out: Tensor, segments: Segments, fmt: ScaledFormat, *, alpha: float) -> None:
    call = call_struct(out, wire_WB, segments, fmt)
    call.alpha = alpha
    _run("decode_sum", call, segments, fmt)
