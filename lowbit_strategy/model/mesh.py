"""Reads from the meshes of sharded modules which ranks average their gradients, and gives modules replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor

from lowbit_strategy.model.sharded import ShardedGroup, set_mesh

CONTEXT_DIMS = ("cp", "context_parallel")


def shard_group(each: ShardedGroup) -> dist.ProcessGroup:
    """The group of ranks over which a module is sharded.

    Raises:
        ValueError: The module is only replicated.
    """
    info: Any = each.param_group.mesh_info
    if not isinstance(info, FSDPMeshInfo):
        raise ValueError(
            f"{each.label} is replicated by torch.distributed's replicate, whose reduction cannot be replaced: wrap"
            " the model in DistributedDataParallel, or call fully_shard with a mesh whose second dim is 1"
        )
    return info.shard_process_group


def mean_ranks(each: ShardedGroup) -> list[int]:
    """The ranks that average the gradients of a sharded module.

    Raises:
        ValueError: The module is only replicated, or its mesh is not in rank order.
    """
    shard_group(each)
    ranks: list[int] = each.mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"{each.label} is on the mesh {each.mesh.mesh.tolist()}, whose ranks are not in order, so its groups would"
            " number them differently: give DeviceMesh ranks that increase along both dims, as init_device_mesh does"
        )
    return ranks


def by_mesh(groups: Iterable[ShardedGroup]) -> list[list[ShardedGroup]]:
    """The groups that FSDP2 shards, by mesh, the largest mesh first, in the same order on all ranks.

    Groups on a single rank, such as experts that only one rank has, are left out, because they are not exchanged.

    Raises:
        ValueError: See `mean_ranks`.
    """
    found: dict[tuple[tuple[int, ...], int], list[ShardedGroup]] = {}
    for each in groups:
        found.setdefault((tuple(mean_ranks(each)), each.mesh.shape[-1]), []).append(each)
    most = max(found, key=lambda key: len(key[0]))
    return [found[key] for key in dict.fromkeys((most, *found)) if key == most or len(key[0]) > 1]


def data_ranks(each: ShardedGroup) -> list[int]:
    """The ranks, including this one, that average a group's gradients and have different data. Ranks that differ along
    a dim called ``cp`` or ``context_parallel`` have parts of the same sequences.
    """
    ranks = mean_ranks(each)
    root: Any = each.mesh._get_root_mesh()
    own = (root.mesh == dist.get_rank()).nonzero()
    for dim, name in enumerate(root.mesh_dim_names or ()):
        if name in CONTEXT_DIMS:
            same_part = set(root.mesh.select(dim, int(own[0, dim])).flatten().tolist())
            ranks = [rank for rank in ranks if rank in same_part]
    return ranks


def has_other_parts(param: nn.Parameter, ranks: Sequence[int], all_ranks: Sequence[int]) -> bool:
    """Whether ranks of `all_ranks` outside `ranks`, which all have this part of `param`, have different parts."""
    if not isinstance(param, DTensor):
        return False
    mesh = param.device_mesh.mesh
    reached = torch.isin(mesh, torch.tensor(ranks))
    for dim, placement in enumerate(param.placements):
        if placement.is_shard():
            reached = reached.any(dim, keepdim=True).expand_as(mesh)
    return {*all_ranks} <= set(mesh[reached].tolist())


def check_parts(meshes: Sequence[Sequence[ShardedGroup]], groups: Iterable[ShardedGroup]) -> None:
    """Check that groups outside the largest mesh belong to a part of the model, with replicas if that mesh has some.

    Args:
        meshes: The result of `by_mesh`.
        groups: All groups that FSDP2 shards.

    Raises:
        ValueError: A group does not, and nothing would synchronize it with the other ranks.
    """
    most, all_ranks = meshes[0][0], mean_ranks(meshes[0][0])
    for each in groups:
        ranks = mean_ranks(each)
        if ranks != all_ranks and not all(has_other_parts(shard, ranks, all_ranks) for shard in each.shards):
            raise ValueError(
                f"{each.label} is sharded over the ranks {each.mesh.mesh.tolist()} and {most.label} over"
                f" {most.mesh.mesh.tolist()}, and its parameters are whole: shard it over the same ranks, or first make"
                " its parameters DTensors on the mesh of the other dims, as for experts"
            )
    for each, *_ in meshes[1:]:
        if each.mesh.ndim != most.mesh.ndim:
            one, other = ("sharded", "replicated, too") if each.mesh.ndim == 1 else ("replicated, too", "sharded")
            raise ValueError(
                f"{each.label} is {one}, and the rest of the model is {other} (HSDP): give fully_shard a mesh of"
                " (replicas, ranks that shard) for both"
            )


def give_replicas(groups: Sequence[ShardedGroup], mesh: DeviceMesh | None = None) -> None:
    """Put modules that are sharded over one dim of `mesh`, (replicas, ranks that shard one model), on both dims, so
    that FSDP2 also reduces over replicas.

    Args:
        groups: These modules' groups, and perhaps others.
        mesh: None: all ranks, in rows of the same length as the modules' meshes.

    Raises:
        ValueError: A module is sharded over different ranks, or its ranks are not consecutive.
    """
    sharded = [each for each in groups if each.mesh.ndim == 1]
    if mesh is None:
        mesh = _mesh_like(mean_ranks(sharded[0]), sharded[0].mesh.device_type)
    rows = mesh.mesh.tolist()
    for each in sharded:
        if (members := mean_ranks(each)) not in rows:
            raise ValueError(
                f"{each.label} is sharded over the ranks {members}, which are not a row of the mesh {rows}: give"
                " fully_shard the mesh of (replicas, ranks that shard one model)"
            )
    for each in sharded:
        set_mesh(each.param_group, HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0))


def _mesh_like(row: list[int], device_type: str) -> DeviceMesh:
    world_size, size = dist.get_world_size(), len(row)
    rows = [list(range(start, start + size)) for start in range(0, world_size - size + 1, size)]
    if row not in rows:
        raise ValueError(
            f"the model is sharded over the ranks {row}, which are not consecutive, so its replicas are unknown: give"
            " fully_shard the mesh of (replicas, ranks that shard one model)"
        )
    return DeviceMesh(device_type, rows, mesh_dim_names=("replicate", "shard"))
