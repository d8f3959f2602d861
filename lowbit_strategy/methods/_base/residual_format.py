"""How residuals are kept: float32, bfloat16, or with one scale per block int8 or, as uint8, two of 4 bits in a byte."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_strategy.collectives.stateful_codec import StateTensors
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.reference import blocks


def read_residual(state: Mapping[str, Tensor]) -> Tensor | None:
    """float32, 1-D: the values of a residual of any kind; None where there is none.

    `state` has ``residual`` and, where that is int8 or uint8, ``residual_scale``, one entry per block.
    """
    residual, scale = state.get("residual"), state.get("residual_scale")
    if residual is None:
        return None
    if scale is not None and residual.dtype == torch.uint8 and residual.numel():
        return unpack_residual(residual.view(scale.numel(), -1), scale.float()).view(-1)
    flat = residual.reshape(-1).float()
    if scale is None or not flat.numel():
        return flat.clone() if flat.data_ptr() == residual.data_ptr() else flat
    return (flat.view(scale.numel(), -1) * scale.float()[:, None]).view(-1)


def write_residual_(state: StateTensors, values: Tensor) -> None:
    """Store float32 `values`, padded to whole blocks where the residual has blocks."""
    residual = state["residual"]
    if "residual_scale" not in state or not residual.numel():
        residual.copy_(values.view_as(residual))
        return
    values_KB = values.to(residual.device).view(state["residual_scale"].numel(), -1)
    codes, scale_K = pack_residual(values_KB) if residual.dtype == torch.uint8 else blocks.quantize_residual(values_KB)
    residual.copy_(codes.view(-1))
    state["residual_scale"].copy_(scale_K)


def pack_residual(e_KB: Tensor, dither_KB: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """uint8 [K, B / 2] and float32 [K], bfloat16 values: codes of 4 bits and their scales."""
    grid = uniform(4, e_KB.shape[1])
    codes_KB, scale_K = blocks.residual_codes(e_KB, grid, dither_KB)
    return blocks.pack(codes_KB, grid), scale_K


def unpack_residual(codes_KC: Tensor, scale_K: Tensor) -> Tensor:
    """float32 [K, B]."""
    grid = uniform(4, 2 * codes_KC.shape[1])
    return blocks.dequantize(blocks.unpack(codes_KC, grid), scale_K, grid)
