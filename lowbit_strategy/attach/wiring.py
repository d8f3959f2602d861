"""Switching between the framework's own communication and the engine's, between steps, on all ranks together."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.collectives.gathering import Gathering
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks import fsdp
from lowbit_strategy.hooks.ddp import DDPHook
from lowbit_strategy.hooks.stock import StockSharding, chose_buckets, renew_reducer
from lowbit_strategy.hooks.weights import install_weights
from lowbit_strategy.hooks.worker import BackwardSide
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.methods.weights.exact import Exact
from lowbit_strategy.model.fsdp_sharding import take_over_replication


class Wiring(Protocol):
    """One model's two ways of communicating; it has the framework's own when it is made."""

    def take(self, weights: WeightCoding | None) -> None:
        """The engine reduces gradients from now on. `weights`: how FSDP2's travel."""

    def give_back(self) -> None:
        """The framework's own: no hook."""

    def close(self) -> bool:
        """End threads. Returns whether nothing runs any more."""


class DDPWiring:
    """Args:
    model: The wrapped model.
    sync: Reduces while it is taken.
    bucket_cap_mb: Of the engine's buckets, unless the user has chosen one; the framework's own keep theirs.
    """

    def __init__(self, model: DistributedDataParallel, sync: GradientSync, bucket_cap_mb: float) -> None:
        self._sync = sync
        self._hook: DDPHook | None = None
        self._taken = False
        self._cap = bucket_cap_mb
        self.wrapped_anew(model)

    def wrapped_anew(self, model: DistributedDataParallel) -> DDPWiring:
        """The framework has wrapped the module again, after `close`."""
        self._model_of = weakref.ref(model)  # the session closes when the model is gone
        self._chosen = chose_buckets(model)
        self._own_cap_mb = model.bucket_bytes_cap / 2**20
        if self._taken:
            self.take(None)
        return self

    @property
    def cap_nbytes(self) -> int:
        """Of the engine's buckets."""
        return round(2**20 * (self._own_cap_mb if self._chosen else self._cap))

    def take(self, weights: WeightCoding | None) -> None:
        self.close()
        model = self._model_of()
        assert model is not None
        renew_reducer(model, None if self._chosen else self._cap)
        self._hook, self._taken = DDPHook(model, self._sync), True

    def give_back(self) -> None:
        self.close()
        self._taken = False
        if (model := self._model_of()) is not None:
            renew_reducer(model, None if self._chosen else self._own_cap_mb)

    def close(self) -> bool:
        hook, self._hook = self._hook, None
        return hook is None or hook.close()


class FSDPWiring:
    """Args:
    module: Sharded over all ranks, or over those of a node.
    sync: Reduces while it is taken.
    gathering: Gives how weights travel between ranks, anew for each time.
    side: HSDP: where shards are reduced while backward goes on.
    mesh: HSDP: see `StockSharding`.
    """

    def __init__(
        self,
        module: nn.Module,
        sync: GradientSync,
        gathering: Callable[[], Gathering],
        side: BackwardSide | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._module = module
        self._sync = sync
        self._gathering = gathering
        self._side = side
        self._stock = StockSharding(module, mesh)
        self._taken: WeightCoding | None = None
        self.take(Exact())  # what cannot be served is refused now
        self.give_back()

    def take(self, weights: WeightCoding | None) -> None:
        weights = weights or Exact()
        if self._taken == weights:
            return
        self._stock.restore()
        if self._side is None:
            fsdp.install(self._module, self._sync)
        else:
            assert self._sync.ranks.intra_node is not None
            take_over_replication(self._module)
            fsdp.install_replicas(self._module, self._sync, self._sync.ranks.intra_node, self._side)
        install_weights(self._module, weights, self._sync, self._gathering())
        self._taken = weights

    def give_back(self) -> None:
        self._taken = None
        self._stock.restore()

    def close(self) -> bool:
        return self._side is None or self._side.close()


def replica_mesh(device: torch.device, num_replicas: int, shard_size: int) -> DeviceMesh:
    """All ranks, for what FSDP2 itself does between replicas; on all of them."""
    return init_device_mesh(device.type, (num_replicas, shard_size), mesh_dim_names=("replicate", "shard"))
