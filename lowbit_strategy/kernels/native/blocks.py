"""Quantization in C, and floats that are sent as they are: same bytes as `lowbit_strategy.kernels.reference`.

C functions take two plain structures (see `lowbit.h`), filled from tensors that were checked first.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat, DenseFormat
from lowbit_strategy.kernels.loco import Feedback
from lowbit_strategy.kernels.native import function, isa, kernels_of
from lowbit_strategy.kernels.native.threads import run
from lowbit_strategy.kernels.segments import Segments

_RULES = {"absmax": 0, "rms": 1, "mean_abs": 2, "ternary": 3}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8_RESIDUAL, _FLOAT32_RESIDUAL = 1, 2  # 0: none
_MAX_CODEBOOK = 256


class FormatStruct(ctypes.Structure):
    _fields_ = (
        ("bits", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("codebook_size", ctypes.c_int32),
        ("code_nbytes", ctypes.c_int32),
        ("zero_code", ctypes.c_int32),
        ("num_planes", ctypes.c_int32),
        ("ternary", ctypes.c_int32),
        ("e2m1", ctypes.c_int32),
        ("planes", ctypes.c_int32 * 4),
        ("max_scale", ctypes.c_float),
        ("top", ctypes.c_float),
        ("codebook", ctypes.c_float * _MAX_CODEBOOK),
        ("thresholds", ctypes.c_float * _MAX_CODEBOOK),
    )


class CallStruct(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.POINTER(FormatStruct)),
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("residual_scale", ctypes.c_void_p),
        ("wire", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("wire_row_stride", ctypes.c_int64),
        ("num_sources", ctypes.c_int64),
        ("x_dtype", ctypes.c_int32),
        ("wire_dtype", ctypes.c_int32),
        ("residual_kind", ctypes.c_int32),
        ("reset", ctypes.c_int32),
        ("stochastic", ctypes.c_int32),
        ("stochastic_residual", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("beta_old", ctypes.c_float),
        ("beta_new", ctypes.c_float),
        ("alpha", ctypes.c_float),
    )
    holds: tuple[Tensor, ...] = ()  # what the pointers point into: a thread may have the call longer than the caller


@lru_cache
def format_struct(fmt: BlockFormat) -> FormatStruct:
    codebook = fmt.codebook or ()
    return FormatStruct(
        bits=fmt.bits,
        block_size=fmt.block_size,
        rule=_RULES[fmt.scale_rule],
        codebook_size=len(codebook),
        code_nbytes=fmt.code_nbytes,
        zero_code=fmt.zero_code,
        num_planes=len(fmt.planes),
        ternary=fmt.is_ternary,
        e2m1=fmt.is_e2m1,
        planes=fmt.planes,
        max_scale=fmt.max_scale,
        top=fmt.top,
        codebook=codebook
        + codebook[-1:] * (_MAX_CODEBOOK - len(codebook)),  # codes that are never sent decode to something too
        thresholds=fmt.thresholds,
    )


class Extent(NamedTuple):
    """What a segment table reaches with a format, in elements, bytes and blocks."""

    num_blocks: int
    x: int
    state: int
    wire: int
    aligned: bool  # whether every piece of the residual starts with a block


def extent(segments: Segments, fmt: BlockFormat | DenseFormat) -> Extent:
    """Computed once per table and format: the C code trusts the table, so nothing may lie outside the buffers."""
    key = ("native", fmt)
    if key not in segments.cache:
        num_blocks = x = state = wire = 0
        for row in segments.rows:
            if min(row.x_offset, row.numel, row.state_offset, row.wire_offset) < 0:
                raise ValueError(f"a segment has a negative offset or size: {row}")
            blocks = fmt.num_blocks(row.numel)
            num_blocks += blocks
            x = max(x, row.x_offset + row.numel)
            state = max(state, row.state_offset + blocks * fmt.block_size)
            wire = max(wire, row.wire_offset + fmt.wire_nbytes(row.numel))
        aligned = all(row.state_offset % fmt.block_size == 0 for row in segments.rows)
        segments.cache[key] = Extent(num_blocks, x, state, wire, aligned)
    found = segments.cache[key]
    assert isinstance(found, Extent)
    return found


def call_struct(x: Tensor, wire_WB: Tensor, segments: Segments, fmt: BlockFormat | DenseFormat) -> CallStruct:
    """The part that encode and decode share. A call without a block format is about floats as they are.

    Raises:
        ValueError: A buffer ends before a segment does, or is not contiguous.
    """
    reach = extent(segments, fmt)
    if not x.is_contiguous() or (wire_WB.shape[0] > 0 and wire_WB.shape[1] > 1 and wire_WB.stride(1) != 1):
        raise ValueError("the buffers must be contiguous")
    if x.numel() < reach.x or (wire_WB.shape[0] > 0 and wire_WB.shape[1] < reach.wire):
        raise ValueError(
            f"segments reach element {reach.x} and wire byte {reach.wire}, but the buffers hold {x.numel()} "
            f"and {wire_WB.shape[1]}"
        )
    call = CallStruct(
        format=None if isinstance(fmt, DenseFormat) else ctypes.pointer(format_struct(fmt)),
        wire_dtype=_DTYPES[fmt.torch_dtype] if isinstance(fmt, DenseFormat) else 0,
        x=x.data_ptr(),
        wire=wire_WB.data_ptr(),
        segments=segments.table.data_ptr(),
        num_segments=len(segments),
        wire_row_stride=wire_WB.stride(0),
        num_sources=wire_WB.shape[0],
        x_dtype=_DTYPES[x.dtype],
    )
    call.holds = (x, wire_WB, segments.table)
    return call


def set_residual(call: CallStruct, feedback: Feedback, segments: Segments, fmt: BlockFormat | DenseFormat) -> None:
    """Point a call at its residual.

    Raises:
        ValueError: The residual or its scales end before a segment does, or are not contiguous.
        TypeError: Their dtypes are not int8 and bfloat16, or float32 alone.
    """
    residual, residual_scale, reach = feedback.residual, feedback.residual_scale, extent(segments, fmt)
    wanted = (torch.float32, None) if residual_scale is None else (torch.int8, torch.bfloat16)
    if (residual.dtype, None if residual_scale is None else residual_scale.dtype) != wanted:
        raise TypeError("the residual must be int8 with a bfloat16 residual_scale, or float32 without")
    if not reach.aligned:
        raise ValueError(f"every state_offset must be a multiple of the block size {fmt.block_size}")
    if not residual.is_contiguous() or not (residual_scale is None or residual_scale.is_contiguous()):
        raise ValueError("the residual and its scales must be contiguous")
    if residual.numel() < reach.state or (
        residual_scale is not None and residual_scale.numel() < reach.state // fmt.block_size
    ):
        raise ValueError(f"segments reach element {reach.state} of the residual, which holds {residual.numel()}")
    call.holds += (residual,) if residual_scale is None else (residual, residual_scale)
    call.residual = residual.data_ptr()
    call.residual_scale = None if residual_scale is None else residual_scale.data_ptr()
    call.residual_kind = _FLOAT32_RESIDUAL if residual_scale is None else _INT8_RESIDUAL
    call.beta_old, call.beta_new = feedback.beta, 1.0 - feedback.beta
    call.reset, call.stochastic_residual = feedback.reset, feedback.stochastic


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
