"""Shards any module with FSDP2: large repeated blocks one by one, and the rest together."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lowbit_strategy.model.sharded import end_iteration

DEFAULT_MIN_SHARD_NUMEL = 500_000
_CONTAINERS = (nn.ModuleList, nn.Sequential)


def blocks_to_shard(module: nn.Module, min_numel: int) -> list[nn.Module]:
    """Entries of module lists and sequences with at least `min_numel` parameters, innermost first.

    Some blocks are sharded together with the surrounding module:

    * a block that shares a parameter with the rest of the model (tied weights): two FSDP2 modules cannot own it
    * modules that may run on some ranks only: entries of module dicts, and of lists called experts. FSDP2 gathers a
      module's parameters when it runs, on all ranks together
    """
    uses = _uses(module)
    chosen: dict[int, nn.Module] = {}
    optional: set[int] = set()
    for name, child in module.named_modules():
        if id(child) in optional or isinstance(child, nn.ModuleDict) or "expert" in name.rpartition(".")[2].lower():
            optional.update(map(id, child.modules()))
        elif isinstance(child, _CONTAINERS):
            for entry in child.children():
                if isinstance(entry, (nn.ModuleList, nn.ModuleDict)):  # never called themselves
                    continue
                is_large = sum(map(torch.Tensor.numel, entry.parameters())) >= min_numel
                if is_large and _uses(entry).items() <= uses.items():  # no parameter is tied to one outside
                    chosen[id(entry)] = entry
    return sorted(chosen.values(), key=lambda entry: sum(1 for _ in entry.modules()))


def _uses(module: nn.Module) -> Counter[int]:
    """The number of modules that hold each parameter."""
    uses: Counter[int] = Counter()
    for child in module.modules():
        uses.update(map(id, filter(None.__ne__, child._parameters.values())))
    return uses


def bring(module: nn.Module, device: torch.device) -> None:
    """Give all ranks the parameters and buffers of rank 0 on `device`, as DDP does, except for sharded ones."""
    module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor.detach(), group_src=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPolicy:
    """Decides what is sharded together.

    Args:
        min_numel: Smallest block of a list or sequence that is gathered and reduced separately.
        forward_methods: Methods that gather parameters as ``forward`` does.
        by_child: Shard the module's children instead of the module. FSDP2 reduces the gradients of a module once its
            forward has returned, which comes too late if backward runs inside it.
        mp_policy: Dtypes of gathered weights and of reduced gradients.
    """

    min_numel: int = DEFAULT_MIN_SHARD_NUMEL
    forward_methods: tuple[str, ...] = ()
    by_child: bool = False
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 (frozen)


def needs_own_type(module: nn.Module) -> bool:
    """Whether a module's parameters must have the dtype of its running statistics."""
    return isinstance(module, _BatchNorm) and module.affine


def shard_any(module: nn.Module, mesh: DeviceMesh, device: torch.device, policy: ShardPolicy) -> None:
    """Move `module` to `device`, the same on all ranks, and shard it, unless it is already sharded.

    Each block is sharded before the next one is moved, so `device` never holds more than the shards and one block.
    Parameters on the meta device are created after sharding: no rank ever holds all of them.
    """
    on_meta = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_meta]
    if not [child for child in module.modules() if isinstance(child, FSDPModule)]:
        shard_module(module, mesh, policy, None if on_meta else functools.partial(bring, device=device))
    else:
        end_iteration(module)
    if on_meta:
        materialize(module, device)
    module.to(device)


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: ShardPolicy,
    prepare: Callable[[nn.Module], None] | None = None,
) -> None:
    """Apply ``fully_shard`` to the blocks, then to `module` or its children.

    Args:
        module: The model.
        mesh: The mesh given to ``fully_shard``.
        policy: Decides what is sharded together.
        prepare: Called with each module just before it is sharded.

    Raises:
        ValueError: Children are sharded separately, and a parameter belongs to none of them or to several.
    """
    wholes = _called_children(module) if policy.by_child else [module]
    if policy.by_child:
        _check_children(module, wholes)
    whole_ids = set(map(id, wholes))

    def shard(part: nn.Module, **options: Any) -> None:
        if prepare is not None:
            prepare(part)
        mp_policy = MixedPrecisionPolicy() if needs_own_type(part) else policy.mp_policy
        fully_shard(part, mesh=mesh, mp_policy=mp_policy, **options)

    if policy.mp_policy.param_dtype is not None:
        for child in module.modules():
            if needs_own_type(child) and id(child) not in whole_ids:
                shard(child)
    for block in blocks_to_shard(module, policy.min_numel):
        if id(block) not in whole_ids and not isinstance(block, FSDPModule):
            shard(block)
    # A child that runs while frozen must not stay gathered: FSDP2 looks at requires_grad when it gathers.
    reshard = True if policy.by_child else None
    for whole in wholes:
        shard(whole, reshard_after_forward=reshard)
        for method in policy.forward_methods:
            if hasattr(whole, method):
                register_fsdp_forward_method(whole, method)
    if prepare is not None and policy.by_child:
        prepare(module)  # its own buffers


def _called_children(module: nn.Module) -> list[nn.Module]:
    """Children with parameters. Lists and dicts, which are never called, are replaced by their entries."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _called_children(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def _check_children(module: nn.Module, children: list[nn.Module]) -> None:
    uses = Counter(id(param) for child in children for param in child.parameters())
    for name, param in module.named_parameters():
        if uses[id(param)] != 1:
            where = "belongs to the module itself" if uses[id(param)] == 0 else "is shared by several of its children"
            raise ValueError(
                f"parameter {name} {where}: with manual optimization every child of the module is sharded separately."
                " Put modules that share parameters into one child, or use the DDP strategy"
            )


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give tensors on the meta device memory and the values that ``reset_parameters`` sets.

    Raises:
        ValueError: A module has such tensors but no ``reset_parameters``.
    """
    for name, child in module.named_modules():
        own = (*child.parameters(recurse=False), *child.buffers(recurse=False))
        if not any(tensor.is_meta for tensor in own):
            continue
        if not callable(reset := getattr(child, "reset_parameters", None)):
            raise ValueError(
                f"{name or 'the model'} ({type(child).__name__}) is on the meta device and has no reset_parameters()"
                " that would give its tensors values: add one, or create it on a real device"
            )
        child.to_empty(device=device, recurse=False)
        reset()
