"""Sharding any module with FSDP2: the large repeated blocks one by one, the rest as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

DEFAULT_MIN_SHARD_NUMEL = 1_000_000
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(child, FSDPModule) for child in module.modules())


def blocks_to_shard(module: nn.Module, min_numel: int) -> list[nn.Module]:
    """Entries of module lists, dicts and sequences with at least `min_numel` parameters, innermost first.

    A block that shares a parameter with the rest of the model (tied weights) is left to the root: two FSDP2 modules
    cannot own one parameter.
    """
    uses = Counter(id(param) for child in module.modules() for param in child._parameters.values() if param is not None)
    chosen = []
    for child in module.modules():
        if isinstance(child, _CONTAINERS):
            chosen += [entry for entry in child.children() if _worth(entry, min_numel, uses)]
    unique = list({id(entry): entry for entry in chosen}.values())
    return sorted(unique, key=lambda entry: sum(1 for _ in entry.modules()))


def _worth(entry: nn.Module, min_numel: int, uses: Counter[int]) -> bool:
    if isinstance(entry, _CONTAINERS[:2]):  # lists and dicts are never called themselves
        return False
    inside = Counter(
        id(param) for child in entry.modules() for param in child._parameters.values() if param is not None
    )
    tied_outside = any(uses[key] != count for key, count in inside.items())
    return not tied_outside and sum(param.numel() for param in entry.parameters()) >= min_numel


def broadcast_parameters(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Parameters and buffers of rank 0 for everyone, as DDP does when it wraps."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), group_src=0, group=group)


def shard_module(module: nn.Module, mesh: DeviceMesh, *, min_numel: int, forward_methods: Iterable[str] = ()) -> None:
    """Apply ``fully_shard`` to the blocks and to `module` itself; `forward_methods` gather parameters like forward."""
    for block in blocks_to_shard(module, min_numel):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for method in forward_methods:
        if hasattr(module, method):
            register_fsdp_forward_method(module, method)
