"""Where a model is, read from the model: the ranks over which its gradients are a mean, and all that hold a part.

FSDP2 and DDP know the first ones, which are the data-parallel dims of a mesh. Its other dims show in parameters that
are a `DTensor`: tensor and expert parallelism. What is somebody else's (other stages of a pipeline) does not show.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
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
from lowbit_strategy.ranks.groups import connected, new_group

_made: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()  # by the default group
Rows = tuple[tuple[int, ...], ...]
CONTEXT_DIMS = ("cp", "context_parallel")


def shard_group(each: ShardedGroup) -> dist.ProcessGroup:
    """The ranks that have a sharded module together.

    Raises:
        ValueError: The module is replicated only.
    """
    info: Any = each.param_group.mesh_info
    if not isinstance(info, FSDPMeshInfo):
        raise ValueError(
            f"{name_of(each)} is replicated by torch.distributed's replicate, whose reduction cannot be replaced: wrap"
            " the model in DistributedDataParallel, or call fully_shard with a mesh whose second dim is 1"
        )
    return info.shard_process_group


def is_hybrid(each: ShardedGroup) -> bool:
    """HSDP: whether the mesh of a module has a dim of replicas."""
    mesh: DeviceMesh = each.param_group.mesh_info.mesh
    return mesh.ndim > 1


def by_rows(groups: Sequence[ShardedGroup]) -> dict[Rows, list[ShardedGroup]]:
    """What FSDP2 shards, by the ranks over which its gradients are a mean, those of most ranks first; the same order on
    all ranks. A row has one model together: HSDP has several.

    What one rank has alone, such as experts of which each is on one rank, is left out: nothing of it is exchanged.

    Raises:
        ValueError: Modules are replicated only, or a mesh is not in the order of ranks.
    """
    found: dict[Rows, list[ShardedGroup]] = {}
    for each in groups:
        found.setdefault(_rows(each), []).append(each)
    most = max(found, key=_num_ranks)
    return {rows: found[rows] for rows in (most, *found) if rows == most or _num_ranks(rows) > 1}


def data_ranks(rows: Rows, each: ShardedGroup) -> list[int]:
    """This rank, and those over which the gradients of a group are a mean that have other data. Ranks that differ by a
    dim called ``cp`` or ``context_parallel`` have parts of the same sequences.
    """
    ranks = [rank for row in rows for rank in row]
    mesh: DeviceMesh = each.param_group.mesh_info.mesh
    root: Any = mesh._get_root_mesh()
    own = (root.mesh == dist.get_rank()).nonzero()
    for dim, name in enumerate(root.mesh_dim_names or ()):
        if name in CONTEXT_DIMS:
            same_part = set(root.mesh.select(dim, int(own[0, dim])).flatten().tolist())
            ranks = [rank for rank in ranks if rank in same_part]
    return ranks


def _num_ranks(rows: Rows) -> int:
    return sum(map(len, rows))


def has_other_parts(param: nn.Parameter, rows: Rows, all_rows: Rows) -> bool:
    """Whether the ranks of `all_rows` that are not among `rows`, which have this part of `param`, have other parts."""
    if not isinstance(param, DTensor):
        return False
    mesh = param.device_mesh.mesh
    own = torch.isin(mesh, torch.tensor([rank for row in rows for rank in row]))
    reached = own
    for dim, placement in enumerate(param.placements):
        if placement.is_shard():
            reached = reached.any(dim, keepdim=True).expand_as(mesh)
    return {rank for row in all_rows for rank in row} <= set(mesh[reached].tolist())


def check_parts(found: Mapping[Rows, Sequence[ShardedGroup]], groups: Iterable[ShardedGroup]) -> None:
    """What is not on the mesh of most ranks must be of a part of the model.

    Args:
        found: By `by_rows`.
        groups: All that FSDP2 shards.

    Raises:
        ValueError: It is not, and nothing would synchronize it over the other ranks.
    """
    all_rows, of_most = next(iter(found.items()))
    for each in groups:
        rows = _rows(each)
        params = [param.sharded_param for param in each.param_group.fsdp_params]
        if not all(has_other_parts(param, rows, all_rows) for param in params if rows != all_rows):
            raise ValueError(
                f"{name_of(each)} is sharded over the ranks {list(map(list, rows))} and {name_of(of_most[0])} over"
                f" {list(map(list, all_rows))}, and its parameters are whole: shard it over the same ranks, or make its"
                " parameters DTensors on the mesh of the other dims before, as for experts"
            )


def _rows(each: ShardedGroup) -> Rows:
    shard_group(each)
    return rows_of(each.param_group.mesh_info.mesh, name_of(each))


def give_replicas(groups: Sequence[ShardedGroup], mesh: DeviceMesh) -> None:
    """Modules that are sharded over one dim of `mesh`, (replicas, ranks that shard one model), are on both: FSDP2's
    reduction is over replicas as well.

    Raises:
        ValueError: One is sharded over other ranks.
    """
    rows = rows_of(mesh)
    sharded = [each for each in groups if not is_hybrid(each)]
    for each in sharded:
        if (members := tuple(dist.get_process_group_ranks(shard_group(each)))) not in rows:
            raise ValueError(
                f"{name_of(each)} is sharded over the ranks {list(members)}, which no row of the mesh"
                f" {list(map(list, rows))} has: give fully_shard the mesh of (replicas, ranks that shard one model)"
            )
    for each in sharded:
        set_mesh(each.param_group, HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0))


def name_of(each: ShardedGroup) -> str:
    """A name of the group, for errors."""
    return f"module {each.name}" if each.name else "the model"


def rows_of(mesh: DeviceMesh, where: str = "the model") -> Rows:
    """The ranks of a mesh of data-parallel dims.

    Raises:
        ValueError: They do not follow each other.
    """
    rows: Rows = tuple(tuple(row) for row in mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist())
    ranks = [rank for row in rows for rank in row]
    if ranks != sorted(ranks):
        raise ValueError(
            f"{where} is on the mesh {mesh.mesh.tolist()}, whose ranks are not in order, so that groups of it would"
            " number them otherwise: give DeviceMesh ranks that increase along both dims, as init_device_mesh does"
        )
    return rows


def mesh_like(row: Sequence[int], device_type: str) -> DeviceMesh:
    """All ranks as a mesh of (replicas, ranks that shard), whose rows are as long as `row`, which is one of them.

    Raises:
        ValueError: It is none.
    """
    world_size, size = dist.get_world_size(), len(row)
    rows = tuple(tuple(range(start, start + size)) for start in range(0, world_size - size + 1, size))
    if tuple(row) not in rows:
        raise ValueError(
            f"the model is sharded over the ranks {list(row)}, which do not follow each other, so that its replicas are"
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


def describe_dims(mesh: DeviceMesh | None) -> str:
    """Which dims of the whole mesh gradients are compressed over; empty if it has one dim, or dims without names.

    Args:
        mesh: The mesh of the data-parallel dims; the second one of two shards.
    """
    if mesh is None or (own := mesh.mesh_dim_names) is None:
        return ""
    root: Any = mesh._get_root_mesh()
    sizes = dict(zip(root.mesh_dim_names or (), root.mesh.shape, strict=False))
    dims = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    inside = "".join(f", exact over {name}" for name, size in zip(own[1:], mesh.shape[1:], strict=True) if size > 1)
    return f"{' x '.join(dims)}, compressed over {own[0]}{inside}" if len(dims) > 1 else ""


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """None: it has none."""
    backend: Any = (group or c10d._get_default_group())._get_backend(device)
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout
