"""Reads from a model's parameters which ranks hold a part of it.

Dims of a mesh that are not data-parallel, those of tensor and expert parallelism, show in parameters that are
`DTensor`s. What belongs to others, such as other stages of a pipeline, does not show.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.ranks.groups import group_of


def model_group(
    module: nn.Module, group: dist.ProcessGroup | None, device: torch.device, mesh: DeviceMesh | None = None
) -> dist.ProcessGroup | None:
    """The group of all ranks that hold part of `module`, including those that share a parameter with a rank of `group`.
    Call it on all of them; None is the default group.

    Args:
        module: The model.
        group: The ranks that average its gradients.
        device: Device of the gradients.
        mesh: A mesh whose ranks always belong to the group.
    """
    own = set(dist.get_process_group_ranks(group))
    meshes = {id(each): each for each in map(_mesh_of, module.parameters()) if each is not None}
    for each in [*meshes.values(), *([] if mesh is None else [mesh])]:
        own.update(each.mesh.flatten().tolist())
    return group_of(sorted(set().union(*gathered(own, group))), group, device)


def _mesh_of(param: nn.Parameter) -> DeviceMesh | None:
    """The mesh of a parameter. DDP with ``device_mesh=`` keeps its local part, and its distribution separately."""
    spec: Any = param if isinstance(param, DTensor) else getattr(param, "_st_info", None)
    return None if spec is None else spec.device_mesh


def describe_dims(mesh: DeviceMesh | None, params: Iterable[nn.Parameter]) -> str:
    """Describe the dims of the whole mesh over which gradients are compressed; empty if it has one dim or unnamed dims.

    Args:
        mesh: The mesh of the data-parallel dims; the second of two dims shards.
        params: Parameters, some of them on the whole mesh, needed if `mesh` was not cut from that.
    """
    if mesh is None or (own := mesh.mesh_dim_names) is None:
        return ""
    whole: list[Any] = [mesh._get_root_mesh(), *filter(None, map(_mesh_of, params))]
    named = [dict(zip(each.mesh_dim_names or (), each.shape, strict=False)) for each in whole]
    dims = max(([f"{name} {size}" for name, size in each.items() if size > 1] for each in named), key=len)
    inside = "".join(f", exact over {name}" for name, size in zip(own[1:], mesh.shape[1:], strict=True) if size > 1)
    return f"{' x '.join(dims)}, compressed over {own[0]}{inside}" if len(dims) > 1 else ""
