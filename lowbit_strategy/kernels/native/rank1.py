"""Matrices with scales of rows times columns in C: same bytes as `lowbit_strategy.kernels.reference.rank1`."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from lowbit_strategy.kernels.format import Rank1Format
from lowbit_strategy.kernels.native import isa, kernels_of, library
from lowbit_strategy.kernels.native.calls import CallStruct, call_struct, extent, format_struct, set_residual
from lowbit_strategy.kernels.native.threads import run
from lowbit_strategy.kernels.segments import Segments


def _run(function: Any, call: CallStruct, segments: Segments, fmt: Rank1Format) -> bool:
    """Whether something was not finite."""
    kernels, call_pointer = kernels_of(isa()), ctypes.byref(call)
    fmt_pointer = ctypes.byref(format_struct(fmt.codes))

    def work(first: int, last: int) -> int:
        return int(function(kernels, fmt_pointer, call_pointer, fmt.columns, first, last))

    mean_numel = extent(segments, fmt).num_blocks * fmt.columns // max(len(segments), 1)
    results = run(work, len(segments), mean_numel)
    if min(results) < 0:
        raise MemoryError(f"no memory for the rows of a matrix with {fmt.columns} columns")
    return any(results)


def encode_(
    x: Tensor, wire: Tensor, segments: Segments, fmt: Rank1Format, *, stochastic: bool, seed: int, flag: Tensor
) -> None:
    call = call_struct(x, wire[None], segments, fmt)
    call.stochastic, call.seed = stochastic, seed & 0xFFFFFFFF
    if _run(library().lowbit_rank1_encode, call, segments, fmt):
        flag |= 1


def decode_sum_(wire_WB: Tensor, out: Tensor, segments: Segments, fmt: Rank1Format, *, alpha: float) -> None:
    call = call_struct(out, wire_WB, segments, fmt)
    call.alpha = alpha
    _run(library().lowbit_rank1_decode_sum, call, segments, fmt)


def loco_encode_(
    x: Tensor,
    residual: Tensor,
    residual_scale: Tensor | None,
    wire: Tensor,
    segments: Segments,
    fmt: Rank1Format,
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
    if _run(library().lowbit_rank1_encode, call, segments, fmt):
        flag |= 1
