"""Reads and writes residuals of all kinds: float32, or int8 with scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit_strategy.codecs.base import Arena, StateTensors
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.reference import blocks
from lowbit_strategy.kernels.reference.rng import dither
from lowbit_strategy.kernels.segments import CACHE_ELEMENTS

ResidualDtype = Literal["int8", "float32"]
HOPS = ("", "uplink.", "downlink.")  # what names of residuals begin with


def residual_arenas(dtype: ResidualDtype) -> dict[str, Arena]:
    if dtype == "float32":
        return {"residual": Arena(torch.float32)}
    return {"residual": Arena(torch.int8), "residual_scale": Arena(torch.bfloat16, per_block=True)}


def zero_residuals(specs: Sequence[TensorSpec], device: torch.device) -> dict[str, StateTensors]:
    """The state of methods that keep nothing but a float32 residual, by parameter name."""
    return {spec.name: {"residual": torch.zeros(spec.numel, dtype=torch.float32, device=device)} for spec in specs}


def read_residual(state: Mapping[str, Tensor], hop: str = "") -> Tensor | None:
    """The values of a residual of any kind, float32, 1-D; None if there is none.

    `state` has ``residual`` and, if that is int8, ``residual_scale`` with one entry per block. For a pair of codecs
    their names begin with `hop`, ``uplink.`` or ``downlink.``.
    """
    residual, scale = state.get(f"{hop}residual"), state.get(f"{hop}residual_scale")
    if residual is None:
        return None
    flat = residual.reshape(-1).float()
    if scale is None or not flat.numel():
        return flat.clone() if flat.data_ptr() == residual.data_ptr() else flat
    return flat.view(scale.numel(), -1).mul_(scale.float()[:, None]).view(-1)


def write_residual_(state: StateTensors, values: Tensor, hop: str = "", key: int | None = None) -> None:
    """Store float32 `values`.

    Args:
        state: See `read_residual`.
        values: Finite values.
        hop: See `read_residual`.
        key: Key of the random numbers by which int8 is rounded; None: round to nearest.
    """
    residual, scale = state[f"{hop}residual"], state.get(f"{hop}residual_scale")
    if scale is None or not residual.numel():
        residual.copy_(values.view_as(residual))
        return
    block_size = residual.numel() // scale.numel()
    for at in range(0, values.numel(), CACHE_ELEMENTS):  # random numbers take several int64 of memory per element
        part = values[at : at + CACHE_ELEMENTS].to(residual.device)
        part_KB = pad(part, (0, -part.numel() % block_size)).view(-1, block_size)
        noise: Tensor | float = 0.0
        if key is not None:
            noise = dither(at, part_KB.numel(), key, residual.device).view_as(part_KB)
        codes_KB, scale_K = blocks.quantize_residual(part_KB, noise)
        residual[at : at + part_KB.numel()] = codes_KB.view(-1)
        scale[at // block_size : at // block_size + len(part_KB)] = blocks.to_bfloat16(scale_K)


def store_error_(residual_N: Tensor, error: Tensor) -> None:
    """Store the error in the residual where it is finite."""
    error_N = error.reshape(-1)
    residual_N.copy_(torch.where(error_N.isfinite(), error_N, residual_N))


def finite_gain(residual_gain: float | None) -> float:
    """Residual per unit not yet sent; 1 if a method gives no law."""
    return 1.0 if residual_gain is None or math.isinf(residual_gain) else residual_gain
