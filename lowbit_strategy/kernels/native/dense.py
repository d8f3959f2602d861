"""Floats that are sent as they are, in C: same bytes as `lowbit_strategy.kernels.reference.dense`."""

from __future__ import annotations

import ctypes

from torch import Tensor

from lowbit_strategy.kernels.format import DenseFormat
from lowbit_strategy.kernels.native import isa, kernels_of, library
from lowbit_strategy.kernels.native.calls import CallStruct, call_struct, extent, wire_dtype
from lowbit_strategy.kernels.native.threads import run
from lowbit_strategy.kernels.segments import Segments


def _call(x: Tensor, wire_WB: Tensor, segments: Segments, fmt: DenseFormat) -> CallStruct:
    call = call_struct(x, wire_WB, segments, fmt)
    call.wire_dtype = wire_dtype(fmt)
    return call


def encode_(x: Tensor, wire: Tensor, segments: Segments, fmt: DenseFormat, *, flag: Tensor) -> None:
    call, function, kernels = _call(x, wire[None], segments, fmt), library().lowbit_dense_encode, kernels_of(isa())
    pointer = ctypes.byref(call)

    def work(first: int, last: int) -> int:
        return int(function(kernels, pointer, first, last))

    if any(run(work, extent(segments, fmt).num_blocks, fmt.block_size)):
        flag |= 1


def decode_sum_(wire_WB: Tensor, out: Tensor, segments: Segments, fmt: DenseFormat, *, alpha: float) -> None:
    call, function, kernels = _call(out, wire_WB, segments, fmt), library().lowbit_dense_decode_sum, kernels_of(isa())
    call.alpha = alpha
    pointer = ctypes.byref(call)

    def work(first: int, last: int) -> None:
        function(kernels, pointer, first, last)

    run(work, extent(segments, fmt).num_blocks, fmt.block_size)
