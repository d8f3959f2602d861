"""What each rank had for itself becomes the same on all ranks: optimizers and a scaler, from the first rank."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lowbit_strategy.collectives.comm import Comm, bytes_from_first_rank
from lowbit_strategy.model.parameters import local_part


@dataclass(frozen=True)
class _Kind:
    """What stands for a tensor until it has come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


def from_first_rank(state: Any, comm: Comm, device: torch.device) -> Any:
    """The first rank's nested plain data and tensors, on every rank; of a sharded tensor each rank's part.

    1. structure and numbers as one message, whose length goes before it
    2. every tensor as it is

    Args:
        state: This rank's; only the first one's is looked at.
        comm: The ranks.
        device: That `comm` sends from.
    """
    tensors: list[Tensor] = []

    def noted(tensor: Tensor) -> _Kind:
        tensors.append(part := local_part(tensor.detach()))
        return _Kind(tuple(part.shape), part.dtype, part.device.type)

    outline = tree_map_only(Tensor, noted, state) if comm.rank == 0 else None
    outline = pickle.loads(bytes_from_first_rank(pickle.dumps(outline), comm, device))
    sent = iter(tensors)

    def arrived(kind: _Kind) -> Tensor:
        values = next(sent).to(device) if comm.rank == 0 else torch.empty(kind.shape, dtype=kind.dtype, device=device)
        values = values.contiguous()
        comm.broadcast(values, 0).wait()
        return values.to(kind.device_type)

    return tree_map_only(_Kind, arrived, outline)


def resharded(part: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's saved state, its tensors sharded again as their parameters are."""
    groups = getattr(part, "param_groups", None)
    if groups is None:  # a gradient scaler
        return dict(saved)
    params = [param for group in groups for param in group["params"]]
    state = {at: {key: _like(params[at], value) for key, value in kept.items()} for at, kept in saved["state"].items()}
    return {**saved, "state": state}


def _like(param: Tensor, value: Any) -> Any:
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or value.shape != param.to_local().shape:
        return value
    return DTensor.from_local(
        value.to(param.device),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
