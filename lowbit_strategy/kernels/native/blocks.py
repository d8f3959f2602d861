"""Blockwise quantisation in C: same bytes as `lowbit_strategy.kernels.reference.blocks`."""

from __future__ import annotations

import ctypes

from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.native import isa, kernels_of, library
from lowbit_strategy.kernels.native.calls import CallStruct, call_struct, extent, format_struct
from lowbit_strategy.kernels.native.threads import run
from lowbit_strategy.kernels.segments import Segments


def run_encode(call: CallStruct, segments: Segments, fmt: BlockFormat, flag: Tensor) -> None:
    function, kernels = library().lowbit_encode, kernels_of(isa())
    fmt_pointer, call_pointer = ctypes.byref(format_struct(fmt)), ctypes.byref(call)

    def work(first: int, last: int) -> int:
        return int(function(kernels, fmt_pointer, call_pointer, first, last))

    if any(run(work, extent(segments, fmt).num_blocks, fmt.block_size)):
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
    function, kernels = library().lowbit_decode_sum, kernels_of(isa())
    fmt_pointer, call_pointer = ctypes.byref(format_struct(fmt)), ctypes.byref(call)

    def work(first: int, last: int) -> None:
        function(kernels, fmt_pointer, call_pointer, first, last)

    run(work, extent(segments, fmt).num_blocks, fmt.block_size)
