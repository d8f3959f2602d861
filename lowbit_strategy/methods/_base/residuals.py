"""Makes, reads and writes residuals of all kinds: float32, or int8 with scales."""

from __future__ import annotations

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
RESIDUAL, SCALE = "residual", "residual_scale"  # names in a method's state
HOPS = ("", "uplink.", "downlink.")  # prefixes of these names
_BLOCK = 128  # elements that share a scale, unless the method decides


def residual_arenas(dtype: ResidualDtype) -> dict[str, Arena]:
    """The state of codecs that only keep a residual."""
    if dtype == "float32":
        return {RESIDUAL: Arena(torch.float32)}
    return {RESIDUAL: Arena(torch.int8), SCALE: Arena(torch.bfloat16, per_block=True)}


def zero_residuals(
    specs: Sequence[TensorSpec], device: torch.device, dtype: ResidualDtype = "float32"
) -> dict[str, StateTensors]:
    """The state of methods that only keep a residual, by parameter name."""
    state = {}
    for spec in specs:
        if dtype == "float32":
            state[spec.name] = {RESIDUAL: torch.zeros(spec.numel, dtype=torch.float32, device=device)}
            continue
        num_blocks = -(-spec.numel // _BLOCK)
        codes = torch.zeros(num_blocks * _BLOCK, dtype=torch.int8, device=device)
        state[spec.name] = {RESIDUAL: codes, SCALE: torch.zeros(num_blocks, dtype=torch.bfloat16, device=device)}
    return state


def read_residual(state: Mapping[str, Tensor], hop: str = "") -> Tensor | None:
    """The values of a residual of any kind, float32, 1-D; None if there is none.

    `state` has ``residual`` and, if that is int8, ``residual_scale`` with one entry per block. For a pair of codecs
    their names begin with `hop`, ``uplink.`` or ``downlink.``.
    """
    residual, scale = state.get(hop + RESIDUAL), state.get(hop + SCALE)
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
    residual, scale = state[hop + RESIDUAL], state.get(hop + SCALE)
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
