"""How residuals are kept: float32, bfloat16, or int8 with one scale per block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lowbit_strategy.collectives.stateful_codec import Arena, StateTensors
from lowbit_strategy.kernels.reference import blocks

ResidualDtype = Literal["float32", "int8"]


def residual_arenas(dtype: ResidualDtype) -> dict[str, Arena]:
    if dtype == "float32":
        return {"residual": Arena(torch.float32)}
    return {"residual": Arena(torch.int8), "residual_scale": Arena(torch.bfloat16, per_block=True)}


def read_residual(state: Mapping[str, Tensor], hop: str = "") -> Tensor | None:
    """float32, 1-D: the values of a residual of any kind; None where there is none.

    `state` has ``residual`` and, where that is int8, ``residual_scale``, one entry per block; of a pair
    of codecs their names begin with `hop`, ``uplink.`` or ``downlink.``.
    """
    residual, scale = state.get(f"{hop}residual"), state.get(f"{hop}residual_scale")
    if residual is None:
        return None
    flat = residual.reshape(-1).float()
    if scale is None or not flat.numel():
        return flat.clone() if flat.data_ptr() == residual.data_ptr() else flat
    return (flat.view(scale.numel(), -1) * scale.float()[:, None]).view(-1)


def write_residual_(state: StateTensors, values: Tensor, hop: str = "") -> None:
    """Store float32 `values`, padded to whole blocks where the residual has blocks."""
    residual, scale = state[f"{hop}residual"], state.get(f"{hop}residual_scale")
    if scale is None or not residual.numel():
        residual.copy_(values.view_as(residual))
        return
    values_KB = values.to(residual.device).view(scale.numel(), -1)
    codes, scale_K = blocks.quantize_residual(values_KB)
    residual.copy_(codes.view(-1))
    scale.copy_(scale_K)
