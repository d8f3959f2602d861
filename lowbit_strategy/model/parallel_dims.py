"""Reads from a model's parameters which ranks hold a part of it.

Mesh dims that are not data-parallel, those of tensor and expert parallelism, are visible in parameters that are
`DTensor`s. Other parts of the model, such as other stages of a pipeline, are not visible.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.ranks.groups import group_with


def model_group(
    module: nn.Module, group: dist.ProcessGroup | None, device: torch.device, mesh: DeviceMesh | None = None
) -> dist.ProcessGroup | None:
    """The group of all ranks that hold part of `module`, including those that share a parameter with a rank of `group`.
    Call it on all of them. None: the default group.

    Args:
        module: The model.
        group: The ranks that average its gradients.
        device: Device of the gradients.
        mesh: A mesh whose ranks always belong to the group.
    """
    own = set(dist.get_process_group_ranks(group))
    meshes = {id(each): each for each in map(mesh_of, module.parameters()) if each is not None}
    for each in [*meshes.values(), *([] if mesh is None else [mesh])]:
        own.update(each.mesh.flatten().tolist())
    return group_with(sorted(set().union(*gathered(own, group))), group, device)


def mesh_of(param: nn.Parameter) -> DeviceMesh | None:
    """The mesh of a parameter. DDP with ``device_mesh=`` keeps its local part, and its distribution separately."""
    spec: Any = param if isinstance(param, DTensor) else getattr(param, "_st_info", None)
    return None if spec is None else spec.device_mesh


def global_shape(param: nn.Parameter) -> torch.Size:
    """The shape of a parameter, of which the ranks of its mesh hold parts."""
    return getattr(param, "_st_info", param).shape
