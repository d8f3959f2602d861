"""FSDP2: what every sharded module does with its gradients goes through a `GradientSync`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.fsdp_gradients import (
    BetweenNodes,
    CompressedReduceScatter,
    HybridReduction,
    OverlappedReducer,
    ShardLayouts,
)
from lowbit_strategy.hooks.weights import install_weights
from lowbit_strategy.methods.weights import WeightCoding
from lowbit_strategy.model.fsdp_sharding import reduce_unused, sharded_groups, take_over_replication
from lowbit_strategy.model.parameters import canonical_name
from lowbit_strategy.plan.gradients import ParamGroup


def reduce_dtype(group: Any) -> torch.dtype:
    """Of the gradients of a parameter group when they are reduced."""
    policy = group.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or group.fsdp_params[0].sharded_param.dtype
    return dtype


def cost_of_accumulation(module: nn.Module, num_batches: int, accumulate: str) -> str | None:
    """In words, for `num_batches` micro-batches per step; None: there is one."""
    if num_batches < 2:
        return None
    if accumulate == "reduce":
        return (
            f"gradients are reduced {num_batches} times per step, and weights gathered as often, because"
            f' accumulate="reduce" keeps none of {num_batches} micro-batches unsharded'
        )
    nbytes = sum(
        param.sharded_param.numel() * reduce_dtype(each.param_group).itemsize
        for each in sharded_groups(module)
        for param in each.param_group.fsdp_params
        if param.sharded_param.requires_grad
    )
    return (
        f"accumulation over {num_batches} micro-batches keeps unsharded gradients, {nbytes / 2**30:.2f} GiB on every"
        f' rank; accumulate="reduce" keeps none and sends {num_batches} times as many bytes'
    )


def install(module: nn.Module, sync: GradientSync, coding: WeightCoding, side: OverlappedReducer | None = None) -> None:
    """Give every FSDP2 module under `module` a compressed reduce-scatter, and its all-gather.

    HSDP: an exact reduce-scatter among the ranks that shard, and the engine over the replicas.

    Args:
        module: The model.
        sync: The engine.
        coding: How weights travel.
        side: Where gradients are reduced while backward goes on; None: FSDP2 waits for each module's.

    Raises:
        ValueError: A parameter is sharded along another dim than the first, or not at all.
    """
    if not sync.scatter:
        take_over_replication(module)
    names = {id(param): canonical_name(name) for name, param in module.named_parameters()}
    found = _sharded_modules(module, sync, names)
    two_levels = sync.scatter and sync.ranks.intra_node is not None and side is None
    between = BetweenNodes(sync.device) if two_levels and sync.device.type == "cuda" else None
    for child, group in found:
        own = {id(param): names[id(param.sharded_param)] for param in group.fsdp_params}
        layouts = ShardLayouts(group, own, sync)
        if sync.scatter:
            reduce_scatter = CompressedReduceScatter(sync, layouts, group, side, between)
            child.set_custom_reduce_scatter(reduce_scatter)
            if reduce_scatter.goes_on:
                child.set_all_reduce_hook(reduce_scatter.between_nodes, stream=between and between.stream)
            continue
        reduction = HybridReduction(sync, layouts, group, side)
        child.set_custom_reduce_scatter(reduction)
        child.set_gradient_divide_factor(1.0)
        if not sync.ranks.alone:
            assert side is not None
            child.set_all_reduce_hook(reduction.all_reduce, stream=side.stream)
    sync.expect(_reduced([group for _, group in found], names))
    install_weights(module, coding, sync, sync.ranks.gathering(sharded_inside=not sync.scatter))


def _reduced(groups: Sequence[Any], names: Mapping[int, str]) -> list[ParamGroup]:
    """What each module reduces, the last module first."""
    found = []
    for group in reversed(groups):
        own = [names[id(p.sharded_param)] for p in group.fsdp_params if p.sharded_param.requires_grad]
        if own:
            found.append(ParamGroup(tuple(own), reduce_dtype(group).itemsize, own[0].rpartition(".")[0]))
    return found


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
        reduce_unused(child, group)
        found.append((child, group))
    if found and (left := [name for key, name in names.items() if key not in sharded and name in sync.specs]):
        which = f"{', '.join(left[:3])}{' ...' if len(left) > 3 else ''}"
        if _holder_is_sharded(module, left[0]):
            raise ValueError(
                f"nothing synchronizes {which}: fully_shard left it out (ignored_params), or it was added afterwards."
                " Freeze it, or shard it as well"
            )
        raise ValueError(
            f"nothing synchronizes {which}: no module that holds it is sharded. Call fully_shard on the whole model as"
            " well, after its parts"
        )
    return found


def _holder_is_sharded(module: nn.Module, name: str) -> bool:
    """Whether FSDP2 has seen a module that holds this parameter."""
    sharded = [canonical_name(path) for path, child in module.named_modules() if isinstance(child, FSDPModule)]
    return any(not path or name.startswith(f"{path}.") for path in sharded)
