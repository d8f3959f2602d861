"""FSDP2: passes the gradients of every sharded module to a `GradientSync`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.all_gather import install_gathers, make_weights
from lowbit_strategy.hooks.fsdp_gradients import BetweenNodes, CompressedReduceScatter, HybridReduction
from lowbit_strategy.hooks.overlap import OverlappedRunner
from lowbit_strategy.hooks.unused import Reductions
from lowbit_strategy.inform import listed
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.parameters import canonical_name, named_parameters
from lowbit_strategy.model.sharded import ShardedGroup, set_mesh, take_over_replication

_SET = ("_all_gather_comm", "_reduce_scatter_comm")  # attributes that attaching sets on FSDP2's parameter groups
_WRAPPED = ("pre_forward", "post_backward")  # methods wrapped on the instance
_HOLDER = "lowbit_wiring"  # attribute for the hook; a reference elsewhere would keep the model alive


class FSDPHook:
    """Gives each sharded module the engine's reduce-scatter and all-gather. Under HSDP the ranks that shard a model do
    an exact reduce-scatter, and the engine reduces over the replicas.

    It remembers FSDP2's own communication. A later instance for the same model takes over, and the earlier one then
    restores nothing.

    Args:
        groups: The model's sharded groups.
        weights: How weights are coded.

    Attributes:
        worker: The thread that reduces gradients, if there is one. It holds no reference to the model.

    Raises:
        ValueError: A parameter is sharded along a dim other than the first, or not at all.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[ShardedGroup], sync: GradientSync, weights: WeightCoding
    ) -> None:
        self._module, self._groups, self._sync = module, groups, sync
        is_far = any(ranks.peers.is_far for ranks in sync.all_ranks)
        self._overlapped = None if sync.sharded and not is_far else OverlappedRunner(sync)
        self.worker = None if self._overlapped is None else self._overlapped.worker
        self._stock: weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, Any], dict[str, Any]]]
        self._stock = weakref.WeakKeyDictionary()
        for each in groups:
            group = each.param_group
            if (earlier := vars(group).get(_HOLDER)) is not None:
                earlier._release()
            values = {name: getattr(group, name) for name in _SET if hasattr(group, name)}
            wrapped = {name: vars(group)[name] for name in _WRAPPED if name in vars(group)}
            self._stock[group] = group.mesh_info, values, wrapped
            setattr(group, _HOLDER, self)
        self.install(weights)

    def install(self, coding: WeightCoding) -> None:
        """Let the engine reduce gradients and gather weights. Call it between steps, on all ranks together.

        Raises:
            ValueError: A parameter is sharded along a dim other than the first, or not at all.
        """
        names = {id(param): name for name, param in named_parameters(self._module)}
        _check_sharded(self._module, self._groups, self._sync, names)
        if not self._sync.sharded:
            take_over_replication(self._groups)
        sync, overlapped = self._sync, self._overlapped
        has_levels = overlapped is None and any(ranks.intra_node is not None for ranks in sync.all_ranks)
        between = BetweenNodes(sync.device) if has_levels and sync.device.type == "cuda" else None
        made = {ranks.peers: Reductions(sync, ranks, overlapped) for ranks in sync.all_ranks}
        weights = make_weights(self._module, self._groups, coding, sync)
        for each in self._groups:
            own = {id(param): names[id(param.sharded_param)] for param in each.param_group.fsdp_params}
            ranks = sync.state.ranks_of(next(iter(own.values())))
            on_reduced = weights.modules[each.name].gradients_reduced
            if sync.sharded:
                CompressedReduceScatter(each.param_group, own, made[ranks.peers], on_reduced, between).install()
            else:
                HybridReduction(each.param_group, own, made[ranks.peers], on_reduced).install()
        install_gathers(self._module, self._groups, weights, sync)

    def restore(self) -> None:
        """Give the modules FSDP2's own communication back."""
        for group, (mesh_info, values, wrapped) in self._stock.items():
            set_mesh(group, mesh_info)
            for name, value in values.items():
                setattr(group, name, value)
            for name in _WRAPPED:
                vars(group).pop(name, None)
            vars(group).update(wrapped)

    def _release(self) -> None:
        self.restore()
        for group in self._stock:
            delattr(group, _HOLDER)
        self._stock.clear()

    def close(self) -> bool:
        """Restore the model as it was before. Return whether the worker has stopped."""
        self._release()
        return self.worker is None or self.worker.close()


def _check_sharded(
    module: nn.Module, groups: Sequence[ShardedGroup], sync: GradientSync, names: Mapping[int, str]
) -> None:
    """Raise a ValueError if a parameter is sharded along a dim other than the first, or not at all."""
    sharded: set[int] = set()
    for each in groups:
        group = each.param_group
        sharded |= set(map(id, each.shards))
        for param in group.fsdp_params:
            if param.fsdp_placement.dim != 0:
                name = names[id(param.sharded_param)]
                raise ValueError(
                    f"{name} is sharded along dim {param.fsdp_placement.dim}, but compression needs rows of dim 0: let"
                    " shard_placement_fn return Shard(0) or None for it"
                )
    if left := [name for key, name in names.items() if key not in sharded and name in sync.specs]:
        which = listed(left)
        if _holder_is_sharded(module, left[0]):
            raise ValueError(
                f"nothing synchronizes {which}: fully_shard left it out (ignored_params), or it was added afterwards."
                " Freeze it, or shard it as well"
            )
        raise ValueError(
            f"nothing synchronizes {which}: no module that holds it is sharded. Call fully_shard on the whole model as"
            " well, after its parts"
        )


def _holder_is_sharded(module: nn.Module, name: str) -> bool:
    """Whether FSDP2 has seen a module that holds this parameter."""
    sharded = [canonical_name(path) for path, child in module.named_modules() if isinstance(child, FSDPModule)]
    return any(not path or name.startswith(f"{path}.") for path in sharded)
