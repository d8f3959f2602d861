"""Describes the mesh dims of a model's parameters, for the start-up report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.ddp import hooked
from lowbit_strategy.model.parallel_dims import mesh_of
from lowbit_strategy.model.parameters import named_parameters
from lowbit_strategy.model.sharded import sharded_groups

_dims: WeakKeyDictionary[GradientSync, list[str]] = WeakKeyDictionary()  # in the order of `GradientSync.all_ranks`


def note_dims(sync: GradientSync, module: nn.Module) -> None:
    """Note the mesh dims of `module`, whose hooks have been made."""
    if sync.weights is None:
        _dims[sync] = [
            describe_dims(getattr(model, "device_mesh", None), model.parameters())
            for model, hook in hooked.items()
            if hook.sync is sync
        ]
        return
    names = {id(param): name for name, param in named_parameters(module) if name in sync.specs}
    found = [(names[id(shard)], each) for each in sharded_groups(module) for shard in each.shards if id(shard) in names]
    _dims[sync] = []
    for ranks in sync.all_ranks:
        groups = [each for name, each in found if sync.state.ranks_of(name) is ranks]
        params = [shard for each in groups for shard in each.shards]
        _dims[sync].append(describe_dims(groups[0].mesh, params) if groups else "")


def dims_of(sync: GradientSync, at: int) -> str:
    """A description of the mesh dims of ``sync.all_ranks[at]``; empty if there is one dim or none is known."""
    noted = _dims.get(sync, [])
    return noted[at] if at < len(noted) else ""


def describe_dims(mesh: DeviceMesh | None, params: Iterable[nn.Parameter]) -> str:
    """Describe the dims of the whole mesh over which gradients are compressed; empty if it has one dim or unnamed dims.

    Args:
        mesh: The mesh of the data-parallel dims; the second of two dims shards.
        params: Parameters, some of them on the whole mesh, needed if `mesh` was not cut from it.
    """
    if mesh is None or (own := mesh.mesh_dim_names) is None:
        return ""
    whole: list[Any] = [mesh._get_root_mesh(), *filter(None, map(mesh_of, params))]
    named = [dict(zip(each.mesh_dim_names or (), each.shape, strict=False)) for each in whole]
    dims = max(([f"{name} {size}" for name, size in each.items() if size > 1] for each in named), key=len)
    inside = "".join(f", exact over {name}" for name, size in zip(own[1:], mesh.shape[1:], strict=True) if size > 1)
    return f"{' x '.join(dims)}, compressed over {own[0]}{inside}" if len(dims) > 1 else ""
