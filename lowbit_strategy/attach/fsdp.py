"""Attaches compression to a model that FSDP2 shards: reads from its meshes which ranks reduce which parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.assembly import compare_with_all, make_engine, make_session
from lowbit_strategy.attach.optimizer_hook import attachment_begins
from lowbit_strategy.attach.prepare import PreparedModel, on_ranks
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.hooks.all_gather import module_layouts
from lowbit_strategy.hooks.fsdp import FSDPHook
from lowbit_strategy.model.differing import differing
from lowbit_strategy.model.mesh import by_mesh, check_parts, give_replicas, has_other_parts, mean_ranks, shard_group
from lowbit_strategy.model.parameters import (
    describe_parameters,
    device_of,
    local_part,
    named_parameters,
    sharded_parameters,
)
from lowbit_strategy.model.sharded import ShardedGroup, check_held, reshard, sharded_groups
from lowbit_strategy.ranks.groups import group_with
from lowbit_strategy.ranks.ranks import Ranks, make_ranks
from lowbit_strategy.ranks.topology import find_topology


def attach_fsdp(
    module: nn.Module,
    prepared: PreparedModel,
    *,
    device: torch.device | None = None,
    mesh: DeviceMesh | None = None,
    has_scaler: bool = False,
) -> Session:
    """Give every FSDP2 module under `module` its compressed reduce-scatter. The ranks given to ``fully_shard`` average
    gradients.

    Args:
        module: The prepared module, after ``fully_shard``.
        prepared: What `prepare` returned, with ``scatter=True``.
        device: Device of the gradients; None: that of the parameters.
        mesh: The mesh of all ranks that hold part of the model, needed only if its parameters do not show it.
        has_scaler: Whether a loss scaler is used (float16).

    Raises:
        ValueError: `module` has no FSDP2 module, or is sharded in a way that cannot be compressed.
    """
    attachment_begins(module)
    if isinstance(module, DistributedDataParallel):
        raise ValueError("attach_fsdp was given a DistributedDataParallel: for DDP it is attach_ddp")
    if not prepared.scatter:
        raise ValueError("the model was prepared for DDP: give prepare scatter=True, which attach_fsdp needs")
    if not (groups := sharded_groups(module)):
        raise ValueError("no module is sharded with fully_shard: nothing to compress")
    reshard(module)  # a forward pass without a backward pass leaves it gathered
    check_held(module, groups)
    device = device_of(module, device)
    meshes = by_mesh(groups)
    _check_shard_size(prepared.options, meshes[0], device)
    if prepared.options.shard_size is not None and meshes[0][0].mesh.ndim == 1:
        give_replicas([each for found in meshes for each in found])  # replicas are requested, but this mesh has none
        meshes = by_mesh(groups)
    check_parts(meshes, groups)
    own, *elsewhere = meshes
    group = _mean_group(own, device)
    everyone = compare_with_all(module, prepared, group, device, mesh, has_scaler=has_scaler)
    prepared, ranks = _on_mesh(prepared, own, device, everyone)
    others: dict[str, Ranks] = {}
    for found in elsewhere:
        others |= dict.fromkeys(_names(module, found), _on_mesh(prepared, found, device, everyone)[1])
    shared = {each.name for found in meshes for each in found}
    groups = [each for each in groups if each.name in shared]
    prepared = replace(prepared, specs=_exchanged(module, groups, mean_ranks(own[0])))
    if prepared.wrapper == "hsdp":
        if prepared.options.comes_and_goes:  # all ranks share one model, which is one replica
            ranks = ranks.coming_and_going()
        _share_weights(module, ranks, others, device)
    layouts = module_layouts(module, groups)
    prepared, sync = make_engine(module, prepared, ranks, device, has_scaler=has_scaler, modules=layouts, others=others)
    assert prepared.weights is not None
    return make_session(module, prepared, sync, hook=FSDPHook(module, groups, sync, prepared.weights))


def _mean_group(groups: Sequence[ShardedGroup], device: torch.device) -> dist.ProcessGroup | None:
    """The group of the ranks of one mesh."""
    return group_with(mean_ranks(groups[0]), shard_group(groups[0]), device)


def _on_mesh(
    prepared: PreparedModel,
    groups: Sequence[ShardedGroup],
    device: torch.device,
    everyone: dist.ProcessGroup | None,
) -> tuple[PreparedModel, Ranks]:
    """The configuration on the ranks of one mesh, and these ranks."""
    mesh, group = groups[0].mesh, _mean_group(groups, device)
    prepared = on_ranks(prepared, find_topology(group), mesh.shape[-1] if mesh.ndim > 1 else None)
    return prepared, make_ranks(group, prepared.topology, device, everyone=everyone)


def _names(module: nn.Module, groups: Sequence[ShardedGroup]) -> list[str]:
    names = {id(param): name for name, param in sharded_parameters(module).items()}
    return [names[id(shard)] for each in groups for shard in each.shards]


def _exchanged(module: nn.Module, groups: Sequence[ShardedGroup], ranks: Sequence[int]) -> tuple[TensorSpec, ...]:
    """The trained parameters whose gradients several ranks average, in their form on the mesh of `ranks`."""
    shared = {id(shard) for each in groups for shard in each.shards}
    alone = {id(shard) for each in sharded_groups(module) for shard in each.shards} - shared
    left = {
        name
        for name, param in sharded_parameters(module).items()
        if id(param) in alone or (id(param) not in shared and has_other_parts(param, [dist.get_rank()], ranks))
    }
    return tuple(spec for spec in describe_parameters(module) if spec.name not in left)


def _check_shard_size(options: SyncOptions, groups: Sequence[ShardedGroup], device: torch.device) -> None:
    """Raise a ValueError if `shard_size` contradicts the model's mesh."""
    asked, found = options.shard_size, groups[0].mesh.shape[-1]
    if asked == "node":  # counts all ranks, if the mesh has no replicas yet
        group = _mean_group(groups, device) if groups[0].mesh.ndim > 1 else None
        asked = find_topology(group).ranks_per_node
    if asked not in (None, found):
        raise ValueError(
            f"shard_size={options.shard_size!r} was asked for, and the model is sharded over {found} ranks: leave"
            " shard_size out, or give fully_shard a mesh of (replicas, shard_size) ranks"
        )


def _share_weights(module: nn.Module, ranks: Ranks, others: Mapping[str, Ranks], device: torch.device) -> None:
    """HSDP: the ranks of a node share one model, and all replicas start with the weights of the first."""
    held: dict[Comm, dict[str, Tensor]] = {ranks.peers: dict(module.named_buffers())}
    for name, param in named_parameters(module):
        held.setdefault(others.get(name, ranks).peers, {})[name] = param
    for peers, same in held.items():
        if differing(same, peers, device):
            _broadcast_shards(same.values(), peers.group)


def _broadcast_shards(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Copy the first replica's shards to all replicas; `group` has the ranks with the same shard."""
    for tensor in tensors:
        if (local := local_part(tensor.detach())).numel():
            dist.broadcast(local, group_src=0, group=group)
