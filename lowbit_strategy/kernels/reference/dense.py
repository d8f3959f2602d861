"""Unquantized floats in plain PyTorch, with a few operations per bucket, however many segments it has."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.kernels.format import DenseFormat
from lowbit_strategy.kernels.segments import Segments, segment_views


def encode_(x: Tensor, wire: Tensor, segments: Segments, fmt: DenseFormat, *, flag: Tensor) -> None:
    if not segments.rows:
        return
    sent = segment_views(wire.view(fmt.torch_dtype), segments, "wire_offset", fmt.code_nbytes)
    torch._foreach_copy_(sent, segment_views(x, segments, "x_offset"))
    nonempty = [piece for piece in sent if piece.numel()]
    if nonempty:
        largest = torch.stack(torch._foreach_norm(nonempty, torch.inf))  # NaN and inf survive a maximum norm
        flag |= (~largest.isfinite().all()).to(flag.dtype)


def decode_sum_(wire_WB: Tensor, out: Tensor, segments: Segments, fmt: DenseFormat, *, alpha: float) -> None:
    if not segments.rows:
        return
    total = None
    for row in wire_WB.view(fmt.torch_dtype):  # rank order, float32: the same bits everywhere
        values = torch.cat(segment_views(row, segments, "wire_offset", fmt.code_nbytes))
        total = values.float() if total is None else total.add_(values)
    assert total is not None
    results = total.mul_(alpha).split([row.numel for row in segments.rows])
    torch._foreach_copy_(segment_views(out, segments, "x_offset"), list(results))
