"""Restores a framework's own communication of a model, as if nothing had been attached.

All calls are between steps, on all ranks.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.model.fsdp_sharding import sharded_groups

_MIB = 1024 * 1024

_SET = (  # by attaching, on the parameter groups of FSDP2
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "_all_reduce_hook",
    "_all_reduce_hook_stream",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_scatter_unused_params",
    "mesh_info",
    "post_forward_mesh_info",
)
_WRAPPED = ("pre_forward", "post_backward")  # on the instance


hooked: weakref.WeakKeyDictionary[DistributedDataParallel, Any] = weakref.WeakKeyDictionary()  # hooks of ours


def chose_buckets(model: DistributedDataParallel) -> bool:
    """Whether the user has given DDP a size of its buckets."""
    return not model.bucket_bytes_cap_default


def renew_reducer(model: DistributedDataParallel, bucket_cap_mb: float | None = None) -> None:
    """Give DDP a new reducer, without a communication hook.

    PyTorch has no call that takes a hook away. This makes the reducer anew, as unpickling a model does.

    Args:
        model: Between steps.
        bucket_cap_mb: Size of the buckets; None: as they are.
    """
    if bucket_cap_mb is not None:
        _set_bucket_cap(model, round(bucket_cap_mb * _MIB))
    model._remove_autograd_hooks()
    parameters, is_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, is_sparse, names, model.static_graph)
    model._comm_hooks = []
    hooked.pop(model, None)
    model._has_rebuilt_buckets = False
    if model.static_graph:
        model.reducer._set_static_graph()
        logger: Any = model.logger
        logger._set_static_graph()


def _set_bucket_cap(model: Any, nbytes: int) -> None:
    first = min(nbytes, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
    model.bucket_bytes_cap = nbytes
    if hasattr(model, "_bucket_config"):  # torch 2.13 and later
        model._bucket_config = dataclasses.replace(
            model._bucket_config, bucket_bytes_cap=nbytes, first_bucket_bytes_cap=first
        )


class NativeSharding:
    """FSDP2's own communication of a model, remembered before anything is attached.

    A later instance for the same model takes over; the earlier one then restores nothing.

    Args:
        module: Sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._remembered: weakref.WeakKeyDictionary[Any, tuple[dict[str, Any], dict[str, Any]]]
        self._remembered = weakref.WeakKeyDictionary()
        for group in [each.param_group for each in sharded_groups(module)]:
            if (earlier := _holders.get(group)) is not None:
                earlier.release()
            values = {name: getattr(group, name) for name in _SET if hasattr(group, name)}
            wrapped = {name: vars(group)[name] for name in _WRAPPED if name in vars(group)}
            self._remembered[group], _holders[group] = (values, wrapped), self

    def restore(self, mesh: DeviceMesh | None = None) -> None:
        """Give everything back.

        Args:
            mesh: HSDP: dims ``replicate`` and ``shard``, over which FSDP2 itself is to reduce where the model was
                sharded over a mesh of one dim. None: as it was sharded.
        """
        for group, (values, wrapped) in self._remembered.items():
            for name, value in values.items():
                setattr(group, name, value)
            info = values["mesh_info"]
            if mesh is not None and not isinstance(info, HSDPMeshInfo):  # to be replicated over another dim too
                group.mesh_info = HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
                if values["post_forward_mesh_info"] == info:
                    group.post_forward_mesh_info = group.mesh_info
            for param in group.fsdp_params:
                if param.post_forward_mesh_info is not None:
                    param.post_forward_mesh_info = group.post_forward_mesh_info
            for name in _WRAPPED:
                vars(group).pop(name, None)
            vars(group).update(wrapped)

    def release(self) -> None:
        """Give everything back, and forget the model."""
        self.restore()
        for group in self._remembered:
            del _holders[group]
        self._remembered.clear()


_holders: weakref.WeakKeyDictionary[Any, NativeSharding] = weakref.WeakKeyDictionary()  # who remembers a group
