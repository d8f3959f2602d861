"""FSDP2: what every sharded module does with its gradients goes through a `GradientSync`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import dim0_cut
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.two_levels import inside_nbytes
from lowbit_strategy.hooks.fsdp_gradients import (
    CompressedReduceScatter,
    ExactReduceScatter,
    GradientRows,
    ReplicaAllReduce,
)
from lowbit_strategy.hooks.worker import BackwardSide
from lowbit_strategy.model.fsdp_sharding import sharded_groups
from lowbit_strategy.model.parameters import canonical_name


def reduced_nbytes(group: Any, world_size: int) -> int:
    """Bytes this rank sends for one exact reduce-scatter of a parameter group's gradients."""
    return (world_size - 1) * _row_nbytes(group, world_size)


def _row_nbytes(group: Any, world_size: int) -> int:
    """Bytes of one rank's gradients in a reduce-scatter."""
    params = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    row_numel = sum(dim0_cut(tuple(param._orig_size), world_size).row_numel for param in params)
    return row_numel * reduce_dtype(group).itemsize


def _largest_nbytes(groups: Sequence[Any], sync: GradientSync) -> int:
    """Gradients of the largest module: modules are reduced one after the other."""
    num_rows = sync.ranks.world_size if sync.scatter else sync.ranks.world_size // sync.ranks.peers.world_size
    return max((num_rows * _row_nbytes(group, num_rows) for group in groups), default=0)


def reduce_dtype(group: Any) -> torch.dtype:
    """Of the gradients of a parameter group when they are reduced."""
    policy = group.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or group.fsdp_params[0].sharded_param.dtype
    return dtype


def install(module: nn.Module, sync: GradientSync) -> int:
    """Give every FSDP2 module under `module` a compressed reduce-scatter. Returns how many were given one.

    Raises:
        ValueError: A parameter is sharded along another dim than the first, or not at all.
    """
    names = {id(param): canonical_name(name) for name, param in module.named_parameters()}
    groups: list[Any] = []
    layouts = []
    for child, group in _sharded_modules(module, sync, names):
        rows = GradientRows(group, names, sync)
        child.set_custom_reduce_scatter(CompressedReduceScatter(sync, rows))
        groups.append(group)
        layouts.append(rows.now().layout)
    sync.expect(layouts)
    if sync.ranks.share is not None:
        dtypes = {
            names[id(param.sharded_param)]: reduce_dtype(group).itemsize
            for group in groups
            for param in group.fsdp_params
        }
        sync.inside_nbytes = inside_nbytes(sync, dtypes)
        sync.inside_buffer_nbytes = 2 * _largest_nbytes(groups, sync)
    return len(groups)


def install_replicas(module: nn.Module, sync: GradientSync, inside: Comm, side: BackwardSide) -> int:
    """HSDP: as `install`, with an exact reduce-scatter among the ranks that shard, and the engine over the replicas."""
    names = {id(param): canonical_name(name) for name, param in module.named_parameters()}
    groups: list[Any] = []
    for child, group in _sharded_modules(module, sync, names):
        groups.append(group)
        child.set_custom_reduce_scatter(ExactReduceScatter(inside))
        child.set_gradient_divide_factor(1.0)
        if sync.ranks.peers.world_size > 1:
            child.set_all_reduce_hook(
                ReplicaAllReduce(sync, group, GradientRows(group, names, sync), side), stream=side.stream
            )
    sync.inside_nbytes = sum(reduced_nbytes(group, inside.world_size) for group in groups)
    sync.inside_buffer_nbytes = _largest_nbytes(groups, sync)
    return len(groups)


def _sharded_modules(module: nn.Module, sync: GradientSync, names: Mapping[int, str]) -> list[tuple[Any, Any]]:
    """Modules with their parameter groups, prepared for communication of our own."""
    found: list[tuple[Any, Any]] = []
    sharded: set[int] = set()
    for each in sharded_groups(module):
        group, child = each.param_group, each.module
        sharded |= {id(param.sharded_param) for param in group.fsdp_params}
        for param in group.fsdp_params:
            if param.fsdp_placement.dim != 0:
                name = names[id(param.sharded_param)]
                raise ValueError(f"{name} is sharded along dim {param.fsdp_placement.dim}: compress only Shard(0)")
        child.set_force_sum_reduction_for_comms(True)
        if hasattr(child, "set_reduce_scatter_unused_params"):
            child.set_reduce_scatter_unused_params(True, recurse=False)
        found.append((child, group))
    if found and (left := [name for key, name in names.items() if key not in sharded and name in sync.specs]):
        raise ValueError(
            f"nothing synchronises {', '.join(left[:3])}{' ...' if len(left) > 3 else ''}: no module that holds it is"
            " sharded. Call fully_shard on the whole model as well, after its parts"
        )
    return found
