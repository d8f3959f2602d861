"""Attaching a model for which the package chooses: the framework's own communication, and an `AutoChoice` at work."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.auto import AutoChoice
from lowbit_strategy.attach.fit import PreparedModel
from lowbit_strategy.attach.strategy_options import default_bucket_cap_mb
from lowbit_strategy.attach.wiring import DDPWiring, FSDPWiring, Wiring, replica_mesh
from lowbit_strategy.collectives.gathering import Gathering
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.worker import BackwardSide
from lowbit_strategy.methods.auto import Auto


def is_to_choose(prepared: PreparedModel, sync: GradientSync) -> bool:
    """Whether the package is to choose, and there is somebody to send to."""
    return isinstance(prepared.compressor, Auto) and not sync.ranks.alone


def choose_for_ddp(
    model: DistributedDataParallel, prepared: PreparedModel, sync: GradientSync, group: dist.ProcessGroup | None
) -> tuple[DDPWiring, AutoChoice]:
    """Nothing is registered with `model` yet."""
    wiring = DDPWiring(model, sync, default_bucket_cap_mb(sync.device))
    return wiring, _choice(prepared, sync, wiring, group)


def choose_for_fsdp(
    module: nn.Module,
    prepared: PreparedModel,
    sync: GradientSync,
    gathering: Callable[[], Gathering],
    group: dist.ProcessGroup | None,
    *,
    side: BackwardSide | None = None,
) -> AutoChoice:
    """Args:
    module: Sharded.
    prepared: Before it was.
    sync: The engine.
    gathering: Gives how weights travel between ranks.
    group: All ranks.
    side: HSDP: where shards are reduced while backward goes on.
    """
    ranks = sync.ranks
    mesh = None
    if side is not None and ranks.share is not None:
        mesh = replica_mesh(torch.device(sync.device.type), ranks.peers.world_size, ranks.share.count)
    return _choice(prepared, sync, FSDPWiring(module, sync, gathering, side, mesh), group)


def _choice(prepared: PreparedModel, sync: GradientSync, wiring: Wiring, group: dist.ProcessGroup | None) -> AutoChoice:
    assert isinstance(prepared.compressor, Auto)
    weights, memory = prepared.options.weights, prepared.options.memory
    return AutoChoice(prepared.compressor, sync, wiring, prepared.layout, weights=weights, memory=memory, group=group)
