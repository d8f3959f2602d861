"""Quantization and unquantized floats in C, with the same bytes as `lowbit_strategy.kernels.reference`.

The C functions take two plain structures (see `lowbit.h`), filled from tensors that were checked first.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat, DenseFormat, Format
from lowbit_strategy.kernels.native import ISA_OVERRIDE, function, kernels_for, threads
from lowbit_strategy.kernels.segments import Segments

_RULES = {"absmax": 0, "rms": 1, "mean_abs": 2}
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
    holds: tuple[object, ...] = ()  # the tensors behind the pointers: a thread may outlive the call


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
        # codes that are never sent must also decode to a number
        codebook=codebook + codebook[-1:] * (_MAX_CODEBOOK - len(codebook)),
        thresholds=fmt.thresholds,
    )


class Extent(NamedTuple):
    """A segment table's extent in a format, in elements, bytes and blocks, and values that all calls share."""

    call: CallStruct
    num_blocks: int
    block_size: int
    numel: int  # elements of all blocks
    x: int
    state: int
    wire: int
    aligned: bool  # whether every piece of the residual starts with a block


def extent(segments: Segments, fmt: Format) -> Extent:
    """Compute the extent. The C code trusts the table, so nothing may lie outside the buffers."""
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
    call = CallStruct(
        format=None if isinstance(fmt, DenseFormat) else ctypes.pointer(format_struct(fmt)),
        wire_dtype=_DTYPES[fmt.torch_dtype] if isinstance(fmt, DenseFormat) else 0,
        segments=segments.table.data_ptr(),
        num_segments=len(segments.rows),
    )
    return Extent(call, num_blocks, fmt.block_size, num_blocks * fmt.block_size, x, state, wire, aligned)


def call_struct(
    x: Tensor, wire_WB: Tensor, segments: Segments, fmt: Format, feedback: Feedback | None = None
) -> tuple[CallStruct, Extent]:
    """Fill the structure that encode and decode share. A call without a block format handles unquantized floats.

    Raises:
        ValueError: A buffer or the residual ends before a segment does, or is not contiguous.
    """
    reach = segments.kept(("native", fmt), lambda: extent(segments, fmt))
    assert isinstance(reach, Extent)
    if not x.is_contiguous() or (wire_WB.shape[0] > 0 and wire_WB.shape[1] > 1 and wire_WB.stride(1) != 1):
        raise ValueError("the buffers must be contiguous")
    if x.numel() < reach.x or (wire_WB.shape[0] > 0 and wire_WB.shape[1] < reach.wire):
        raise ValueError(
            f"segments reach element {reach.x} and wire byte {reach.wire}, but the buffers hold {x.numel()} "
            f"and {wire_WB.shape[1]}"
        )
    call = CallStruct.from_buffer_copy(reach.call)
    call.x, call.x_dtype = x.data_ptr(), _DTYPES[x.dtype]
    call.wire, call.wire_row_stride, call.num_sources = wire_WB.data_ptr(), wire_WB.stride(0), wire_WB.shape[0]
    call.holds = (x, wire_WB, segments.table, reach.call)
    if feedback is None:
        return call, reach
    residual, residual_scale, block_size = feedback.residual, feedback.residual_scale, reach.block_size
    if not reach.aligned:
        raise ValueError(f"every state_offset must be a multiple of the block size {block_size}")
    if not residual.is_contiguous() or not (residual_scale is None or residual_scale.is_contiguous()):
        raise ValueError("the residual and its scales must be contiguous")
    if residual.numel() < reach.state or (
        residual_scale is not None and residual_scale.numel() < reach.state // block_size
    ):
        raise ValueError(f"segments reach element {reach.state} of the residual, which holds {residual.numel()}")
    call.holds += (residual,) if residual_scale is None else (residual, residual_scale)
    call.residual = residual.data_ptr()
    call.residual_scale = None if residual_scale is None else residual_scale.data_ptr()
    call.residual_kind = _FLOAT32_RESIDUAL if residual_scale is None else _INT8_RESIDUAL
    call.beta_old, call.beta_new = feedback.beta, 1.0 - feedback.beta
    call.reset, call.stochastic_residual = feedback.reset, feedback.stochastic
    return call, reach


def _run(name: str, call: CallStruct, reach: Extent) -> bool:
    """Call a library function for all blocks, in several threads if it pays off. Return whether it found a bad
    block.
    """
    work, kernels, pointer = function(name), kernels_for(os.environ.get(ISA_OVERRIDE)), ctypes.byref(call)
    if reach.numel < 2 * threads.GRAIN:
        return bool(work(kernels, pointer, 0, reach.num_blocks))
    return any(threads.run(lambda *part: work(kernels, pointer, *part), reach.num_blocks, reach.block_size))


def encode_(
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    fmt: Format,
    *,
    flag: Tensor,
    stochastic: bool = False,
    seed: int = 0,
    feedback: Feedback | None = None,
) -> None:
    call, reach = call_struct(x, wire[None], segments, fmt, feedback)
    call.stochastic, call.seed = stochastic, seed & 0xFFFFFFFF
    if _run("lowbit_encode", call, reach):
        flag |= 1


def decode_sum_(wire_WB: Tensor, out: Tensor, segments: Segments, fmt: Format, *, alpha: float) -> None:
    call, reach = call_struct(out, wire_WB, segments, fmt)
    call.alpha = alpha
    _run("lowbit_decode_sum", call, reach)
