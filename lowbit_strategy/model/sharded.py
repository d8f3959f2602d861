"""The groups of parameters that FSDP2 has sharded in a model, and operations on them between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from lowbit_strategy.model.parameters import canonical_name, param_groups
from lowbit_strategy.options.sizes import size


@dataclass(frozen=True, slots=True)
class ShardedGroup:
    """One or several modules that FSDP2 shards together, or those of their parameters that are on one mesh.

    Args:
        name: Name of the first module, with a number if its parameters are on several meshes.
        module: The module.
        param_group: FSDP2's record of it.
        gathered_in_backward: Whether the weights are freed after forward, and gathered again for backward.
    """

    name: str
    module: FSDPModule
    param_group: Any
    gathered_in_backward: bool

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the ranks that average its gradients: those that shard it, or under HSDP (replicas, shards)."""
        mesh: DeviceMesh = self.param_group.mesh_info.mesh
        return mesh

    @property
    def label(self) -> str:
        """Its name in errors."""
        return f"module {self.name}" if self.name else "the model"

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's parts of its parameters."""
        return [param.sharded_param for param in self.param_group.fsdp_params]


def sharded_groups(module: nn.Module) -> list[ShardedGroup]:
    """The groups that FSDP2 shards under `module`, in the order of its modules."""
    found: list[ShardedGroup] = []
    seen: set[int] = set()
    inside: set[int] = set()  # modules inside a sharded module that was seen before
    for name, child in module.named_modules():
        if not isinstance(child, FSDPModule):
            continue
        is_root = id(child) not in inside
        inside.update(map(id, module.get_submodule(name).modules()))
        state: Any = child._get_fsdp_state()
        if id(state) in seen:
            continue  # a group of several modules has one state
        seen.add(id(state))
        for at, group in enumerate(param_groups(child)):
            # FSDP2 keeps the outermost module's weights until backward, unless reshard_after_forward was set
            stays = group.post_forward_mesh_info is None or (is_root and bool(state._auto_reshard_after_forward))
            named = canonical_name(name) + (f"[{at}]" if at else "")
            found.append(ShardedGroup(named, child, group, gathered_in_backward=not stays))
    return found


def end_iteration(module: nn.Module) -> None:
    """Reshard everything. This is also needed after an exception in forward or backward; otherwise parameters would be
    gathered, perhaps decoded, weights instead of shards. Call it only between steps, because gradients that have not
    been reduced are lost.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            has_run = child._get_fsdp_state()._is_root  # None: not yet
            if has_run and hasattr(child, "reset_iter_state"):  # since torch 2.13
                child.reset_iter_state()
    reshard(module)
    for group in sharded_groups(module):  # neither torch nor `zero_grad` clears what a window has accumulated there
        for param in group.param_group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if (gathered := getattr(param, "_unsharded_param", None)) is not None:  # None: not yet gathered
                gathered.grad = None


def reshard(module: nn.Module) -> None:
    """Free gathered weights: those of the outermost module remain after a forward pass without a backward pass."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def check_held(module: nn.Module, groups: Sequence[ShardedGroup]) -> None:
    """Raise a ValueError if FSDP2 shards a parameter that the model no longer has."""
    held = set(map(id, module.parameters()))
    for each in groups:
        for param in each.param_group.fsdp_params:
            if held.isdisjoint((id(param.sharded_param), id(getattr(param, "_unsharded_param", None)))):
                raise ValueError(
                    f"{each.label} was sharded with parameters that it no longer has: a layer was replaced or removed"
                    " after fully_shard, and its replacement is not sharded. Change the model before it is sharded, or"
                    " build it again"
                )


def take_over_replication(groups: Sequence[ShardedGroup]) -> None:
    """Stop FSDP2 from reducing over the replicas of a two-dimensional mesh (HSDP), because the caller does it."""
    for param_group in [each.param_group for each in groups]:
        info: Any = param_group.mesh_info
        if isinstance(info, HSDPMeshInfo):
            set_mesh(param_group, FSDPMeshInfo(mesh=info.mesh, shard_mesh_dim=info.shard_mesh_dim))


def set_mesh(param_group: Any, info: Any) -> None:
    """Set the ranks over which FSDP2 gathers and reduces.

    The mesh after a forward pass must be the same object: FSDP2 treats two objects as two meshes, and would clone a
    shard of the gathered weights and gather it in backward.
    """
    before, param_group.mesh_info = param_group.mesh_info, info
    for place in (param_group, *param_group.fsdp_params):
        if place.post_forward_mesh_info is before:
            place.post_forward_mesh_info = info


def reduce_dtype(group: Any) -> torch.dtype:
    """The dtype in which a parameter group's gradients are reduced."""
    policy = group.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or group.fsdp_params[0].sharded_param.dtype
    return dtype


def cost_of_accumulation(module: nn.Module, num_batches: int, accumulate: str) -> str | None:
    """A message about the cost of accumulating `num_batches` micro-batches per step; None if there is only one."""
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
        f"accumulation over {num_batches} micro-batches keeps unsharded gradients, {size(nbytes)} on every"
        f' rank; accumulate="reduce" keeps none and sends {num_batches} times as many bytes'
    )
