"""The operations of a sparse step: take entries out of the residual, and add up those of all ranks. Results do not
depend on the backend.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.kernels.backends import is_native
from lowbit_strategy.kernels.native import function


def take_out_(residual: Tensor, indices: Tensor, values: Tensor, sent: Tensor) -> None:
    """Set ``residual[indices] = values - sent``, or 0 where that is not finite.

    Args:
        residual: float32 [N], contiguous.
        indices: int64 [k], without duplicates.
        values: float32 [k].
        sent: float32 [k].
    """
    if not indices.numel():
        return
    if is_native(residual.device):
        arguments = residual, indices.contiguous(), values.contiguous(), sent.contiguous()
        function("lowbit_take_out")(*map(Tensor.data_ptr, arguments), indices.numel())
    else:
        residual.index_copy_(0, indices, (values - sent).nan_to_num_(0.0, 0.0, 0.0))


def write_sum_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], alpha: float) -> None:
    """``out = alpha * sum of parts``, added part by part in float32; zeros elsewhere.

    Args:
        out: float [N], contiguous.
        parts: For each source in order, positions, int64 [k] without duplicates, and values, float32 [k].
        alpha: 1/W makes it a mean.
    """
    if is_native(out.device) and out.dtype == torch.float32 and out.is_contiguous():
        _write_sum_in_c_(out, [(indices.contiguous(), values.contiguous()) for indices, values in parts], alpha)
    else:
        _write_sum_in_torch_(out, parts, alpha)


def _write_sum_in_torch_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], alpha: float) -> None:
    dense = out.dtype == torch.float32
    total = out.zero_() if dense else torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    for indices, values in parts:
        total.index_add_(0, indices, values)
    if alpha != 1.0:
        everywhere = torch.cat([indices for indices, _ in parts])  # duplicates are written twice, with equal values
        total.index_copy_(0, everywhere, total.index_select(0, everywhere).mul_(alpha))
    if not dense:
        out.copy_(total)


def _write_sum_in_c_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], alpha: float) -> None:
    counts, positions, values = [], [], []
    for index_E, value_E in parts:
        counts.append(value_E.numel())
        positions.append(index_E.data_ptr())
        values.append(value_E.data_ptr())
    pointers = ctypes.c_void_p * len(parts)
    room = torch.empty(sum(counts) if alpha != 1.0 else 0, dtype=torch.float32)
    function("lowbit_add_entries")(
        out.zero_().data_ptr(),
        pointers(*positions),
        pointers(*values),
        (ctypes.c_int64 * len(parts))(*counts),
        len(parts),
        alpha,
        room.data_ptr(),
    )
