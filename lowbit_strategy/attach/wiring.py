"""Switching between the framework's own communication and the engine's, between steps, on all ranks together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.strategy_options import default_bucket_cap_mb
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks import fsdp
from lowbit_strategy.hooks.ddp import DDPHook, chose_buckets, renew_reducer
from lowbit_strategy.hooks.fsdp_gradients import OverlappedReducer
from lowbit_strategy.methods.weights import Exact, WeightCoding
from lowbit_strategy.model.fsdp_sharding import ShardedGroup

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


class DDPWiring:
    """Switches a DDP model between the framework's communication, with which it begins, and the engine's.

    Args:
        model: The wrapped model.
        sync: Its buckets have the default size unless the user has chosen one; the framework's keep theirs.
    """

    def __init__(self, model: DistributedDataParallel, sync: GradientSync) -> None:
        self._sync = sync
        self._hook: DDPHook | None = None
        self._taken = False
        self._cap = default_bucket_cap_mb(sync.device)
        self.wrapped_anew(model)

    def wrapped_anew(self, model: DistributedDataParallel) -> DDPWiring:
        """The framework has wrapped the module again, after `close`. Returns this object."""
        self._model_of = weakref.ref(model)  # the session closes when the model is gone
        self._chosen = chose_buckets(model)
        self._own_cap_mb = model.bucket_bytes_cap / 2**20
        if self._taken:
            self.take(None)
        return self

    @property
    def cap_nbytes(self) -> int:
        """The size of the engine's buckets."""
        return round(2**20 * (self._own_cap_mb if self._chosen else self._cap))

    def take(self, weights: WeightCoding | None) -> None:
        """From now on the engine reduces gradients. `weights`: how FSDP2's travel."""
        self.close()
        model = self._model_of()
        assert model is not None
        renew_reducer(model, None if self._chosen else self._cap)
        self._hook, self._taken = DDPHook(model, self._sync), True

    def give_back(self) -> None:
        """Back to the framework's communication: no hook."""
        self.close()
        self._taken = False
        if (model := self._model_of()) is not None:
            renew_reducer(model, None if self._chosen else self._own_cap_mb)

    def close(self) -> bool:
        """End threads. Returns True once they have stopped."""
        hook, self._hook = self._hook, None
        return hook is None or hook.close()


class NativeSharding:
    """FSDP2's own communication of a model, remembered before anything is attached.

    A later instance for the same model takes over; the earlier one then restores nothing.

    Args:
        groups: What FSDP2 shards.
    """

    def __init__(self, groups: Sequence[ShardedGroup]) -> None:
        self._remembered: weakref.WeakKeyDictionary[Any, tuple[dict[str, Any], dict[str, Any]]]
        self._remembered = weakref.WeakKeyDictionary()
        for each in groups:
            group = each.param_group
            if (earlier := _holders.get(group)) is not None:
                earlier.release()
            values = {name: getattr(group, name) for name in _SET if hasattr(group, name)}
            wrapped = vars(group).keys() & _WRAPPED
            self._remembered[group] = values, {name: vars(group)[name] for name in wrapped} if wrapped else {}
            _holders[group] = self

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


class FSDPWiring:
    """As `DDPWiring`, for a model that is sharded over all ranks or over those of a node.

    Args:
        module: The model.
        groups: What FSDP2 shards of it.
        sync: Its engine.
        side: Reduces shards while backward goes on; None: FSDP2 waits for each module's.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ShardedGroup],
        sync: GradientSync,
        side: OverlappedReducer | None = None,
    ) -> None:
        self._module = module
        self._sync = sync
        self._side = side
        self._stock = NativeSharding(groups)
        self._taken: WeightCoding | None = None

    def take(self, weights: WeightCoding | None) -> None:
        weights = weights or Exact()
        if self._taken == weights:
            return
        if self._taken is not None:
            self.give_back()
        fsdp.install(self._module, self._sync, weights, self._side)
        self._taken = weights

    def give_back(self) -> None:
        if self._taken is not None and self._sync.weights is not None:
            self._sync.weights.end()
        self._taken = None
        alone = self._sync.scatter or self._sync.ranks.comes_and_goes  # FSDP2 itself reduces over no replica
        self._stock.restore(None if alone else self._hybrid_mesh())

    def _hybrid_mesh(self) -> DeviceMesh:
        """HSDP: the engine's groups, for the steps in which FSDP2 reduces."""
        ranks = self._sync.ranks
        assert ranks.intra_node is not None
        world = ranks.world.group if ranks.world.group is not None else dist.group.WORLD
        groups: list[Any] = [ranks.peers.group, ranks.intra_node.group]
        return DeviceMesh.from_group(
            groups,
            self._sync.device.type,
            torch.tensor(dist.get_process_group_ranks(world)).view(ranks.peers.world_size, -1),
            mesh_dim_names=("replicate", "shard"),
        )

    def close(self) -> bool:
        """Leave the model as it was before. Returns True once threads have stopped."""
        self._stock.release()
        return self._side is None or self._side.close()


Wiring = DDPWiring | FSDPWiring
