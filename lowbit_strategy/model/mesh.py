"""Where a model is, read from the model: the ranks over which its gradients are a mean, and all that hold a part.

FSDP2 and DDP know the first ones, which are the data-parallel dims of a mesh. Its other dims show in parameters that
are a `DTensor`: tensor and expert parallelism. What is somebody else's (other stages of a pipeline) does not show.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor

from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.model.fsdp_sharding import ShardedGroup, set_mesh
from lowbit_strategy.ranks.groups import connected, new_group, timeout_of

_made: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()  # by the default group
CONTEXT_DIMS = ("cp", "context_parallel")


def shard_group(each: ShardedGroup) -> dist.ProcessGroup:
    """The ranks that have a sharded module together.

    Raises:
        ValueError: The module is replicated only.
    """
    info: Any = each.param_group.mesh_info
    if not isinstance(info, FSDPMeshInfo):
        raise ValueError(
            f"{each.label} is replicated by torch.distributed's replicate, whose reduction cannot be replaced: wrap"
            " the model in DistributedDataParallel, or call fully_shard with a mesh whose second dim is 1"
        )
    return info.shard_process_group


def mean_ranks(each: ShardedGroup) -> list[int]:
    """The ranks over which gradients of a sharded module are a mean.

    Raises:
        ValueError: The module is replicated only, or its mesh is not in the order of ranks.
    """
    shard_group(each)
    ranks: list[int] = each.mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"{each.label} is on the mesh {each.mesh.mesh.tolist()}, whose ranks are not in order, so that groups of it"
            " would number them otherwise: give DeviceMesh ranks that increase along both dims, as init_device_mesh"
            " does"
        )
    return ranks


def by_mesh(groups: Iterable[ShardedGroup]) -> list[list[ShardedGroup]]:
    """What FSDP2 shards, mesh by mesh, that of most ranks first; the same order on all ranks.

    What one rank has alone, such as experts of which each is on one rank, is left out: nothing of it is exchanged.

    Raises:
        ValueError: See `mean_ranks`.
    """
    found: dict[tuple[tuple[int, ...], int], list[ShardedGroup]] = {}
    for each in groups:
        found.setdefault((tuple(mean_ranks(each)), each.mesh.shape[-1]), []).append(each)
    most = max(found, key=lambda key: len(key[0]))
    return [found[key] for key in dict.fromkeys((most, *found)) if key == most or len(key[0]) > 1]


def data_ranks(each: ShardedGroup) -> list[int]:
    """This rank, and those over which the gradients of a group are a mean that have other data. Ranks that differ by a
    dim called ``cp`` or ``context_parallel`` have parts of the same sequences.
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
    """Whether those of `all_ranks` that are not among `ranks`, which have this part of `param`, have other parts."""
    if not isinstance(param, DTensor):
        return False
    mesh = param.device_mesh.mesh
    reached = torch.isin(mesh, torch.tensor(ranks))
    for dim, placement in enumerate(param.placements):
        if placement.is_shard():
            reached = reached.any(dim, keepdim=True).expand_as(mesh)
    return {*all_ranks} <= set(mesh[reached].tolist())


def check_parts(meshes: Sequence[Sequence[ShardedGroup]], groups: Iterable[ShardedGroup]) -> None:
    """What is not on the mesh of most ranks must be of a part of the model, with replicas if that has some.

    Args:
        meshes: By `by_mesh`.
        groups: All that FSDP2 shards.

    Raises:
        ValueError: It is not, and nothing would synchronize it over the other ranks.
    """
    most, all_ranks = meshes[0][0], mean_ranks(meshes[0][0])
    for each in groups:
        ranks = mean_ranks(each)
        if ranks != all_ranks and not all(has_other_parts(shard, ranks, all_ranks) for shard in each.shards):
            raise ValueError(
                f"{each.label} is sharded over the ranks {each.mesh.mesh.tolist()} and {most.label} over"
                f" {most.mesh.mesh.tolist()}, and its parameters are whole: shard it over the same ranks, or make its"
                " parameters DTensors on the mesh of the other dims before, as for experts"
            )
    for each, *_ in meshes[1:]:
        if each.mesh.ndim != most.mesh.ndim:
            one, other = ("sharded", "replicated, too") if each.mesh.ndim == 1 else ("replicated, too", "sharded")
            raise ValueError(
                f"{each.label} is {one}, and the rest of the model is {other} (HSDP): give fully_shard a mesh of"
                " (replicas, ranks that shard) for both"
            )


def give_replicas(groups: Sequence[ShardedGroup], mesh: DeviceMesh | None = None) -> None:
    """Modules that are sharded over one dim of `mesh`, (replicas, ranks that shard one model), are on both: FSDP2's
    reduction is over replicas as well.

    Args:
        groups: They, and perhaps others.
        mesh: None: all ranks, in rows as long as those of the modules.

    Raises:
        ValueError: One is sharded over other ranks, or their ranks do not follow each other.
    """
    sharded = [each for each in groups if each.mesh.ndim == 1]
    if mesh is None:
        mesh = _mesh_like(mean_ranks(sharded[0]), sharded[0].mesh.device_type)
    rows = mesh.mesh.tolist()
    for each in sharded:
        if (members := mean_ranks(each)) not in rows:
            raise ValueError(
                f"{each.label} is sharded over the ranks {members}, which no row of the mesh"
                f" {rows} has: give fully_shard the mesh of (replicas, ranks that shard one model)"
            )
    for each in sharded:
        set_mesh(each.param_group, HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0))


def _mesh_like(row: list[int], device_type: str) -> DeviceMesh:
    world_size, size = dist.get_world_size(), len(row)
    rows = [list(range(start, start + size)) for start in range(0, world_size - size + 1, size)]
    if row not in rows:
        raise ValueError(
            f"the model is sharded over the ranks {row}, which do not follow each other, so that its replicas are"
            " not known: give fully_shard the mesh of (replicas, ranks that shard one model)"
        )
    return DeviceMesh(device_type, rows, mesh_dim_names=("replicate", "shard"))


def model_group(
    module: nn.Module, group: dist.ProcessGroup | None, device: torch.device, mesh: DeviceMesh | None = None
) -> dist.ProcessGroup | None:
    """All ranks that hold a part of `module`: those that share a parameter with one of `group` as well. Call on all of
    them; None is the default group.

    Args:
        module: The model.
        group: The ranks over which its gradients are a mean.
        device: Where gradients are.
        mesh: Whose ranks belong to them in any case.
    """
    own = set(dist.get_process_group_ranks(group))
    meshes = {id(each): each for each in map(_mesh_of, module.parameters()) if each is not None}
    for each in [*meshes.values(), *([] if mesh is None else [mesh])]:
        own.update(each.mesh.flatten().tolist())
    return group_of(sorted(set().union(*gathered(own, group))), group, device)


def _mesh_of(param: nn.Parameter) -> DeviceMesh | None:
    """DDP with ``device_mesh=`` keeps the local part, and next to it how it was distributed."""
    spec: Any = param if isinstance(param, DTensor) else getattr(param, "_st_info", None)
    return None if spec is None else spec.device_mesh


def group_of(ranks: Sequence[int], near: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """The group of these ranks, made once in a run; call on all of them.

    Args:
        ranks: Global ones, in order.
        near: A group that may be it, and whose timeout it gets.
        device: Where its tensors are.
    """
    if len(ranks) == dist.get_world_size():
        return None
    if list(ranks) == dist.get_process_group_ranks(near):
        return near
    made = _made.setdefault(c10d._get_default_group(), {})
    if (key := tuple(ranks)) not in made:
        purpose = f"model/{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}"
        made[key] = connected(new_group(ranks, None, purpose, timeout=timeout_of(near, device)), device)
    return made[key]


def describe_dims(mesh: DeviceMesh | None, params: Iterable[nn.Parameter]) -> str:
    """Which dims of the whole mesh gradients are compressed over; empty if it has one dim, or dims without names.

    Args:
        mesh: The mesh of the data-parallel dims; the second one of two shards.
        params: Some are on the whole mesh, where that is not the one that `mesh` is cut from.
    """
    if mesh is None or (own := mesh.mesh_dim_names) is None:
        return ""
    whole: list[Any] = [mesh._get_root_mesh(), *filter(None, map(_mesh_of, params))]
    named = [dict(zip(each.mesh_dim_names or (), each.shape, strict=False)) for each in whole]
    dims = max(([f"{name} {size}" for name, size in each.items() if size > 1] for each in named), key=len)
    inside = "".join(f", exact over {name}" for name, size in zip(own[1:], mesh.shape[1:], strict=True) if size > 1)
    return f"{' x '.join(dims)}, compressed over {own[0]}{inside}" if len(dims) > 1 else ""
