"""Switching between the framework's own communication and the engine's, between steps, on all ranks together."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.strategy_options import default_bucket_cap_mb
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks import fsdp
from lowbit_strategy.hooks.ddp import DDPHook
from lowbit_strategy.hooks.fsdp_gradients import OverlappedReducer
from lowbit_strategy.hooks.native import NativeSharding, chose_buckets, renew_reducer
from lowbit_strategy.methods.weights import Exact, WeightCoding


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


class FSDPWiring:
    """As `DDPWiring`, for a model that is sharded over all ranks or over those of a node.

    Args:
        module: The model.
        sync: Its engine.
        side: Reduces shards while backward goes on; None: FSDP2 waits for each module's.
    """

    def __init__(self, module: nn.Module, sync: GradientSync, side: OverlappedReducer | None = None) -> None:
        self._module = module
        self._sync = sync
        self._side = side
        self._stock = NativeSharding(module)
        self._taken: WeightCoding | None = None

    def take(self, weights: WeightCoding | None) -> None:
        weights = weights or Exact()
        if self._taken == weights:
            return
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
