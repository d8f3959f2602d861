"""Sharded inside a node: the strategy for small models, and what a rank has come to with it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from lowbit_strategy import LoCo
from lowbit_strategy.lightning import LowBitFSDPStrategy
from testing.training.comparing import fingerprint
from testing.training.regression import MIN_SHARD_NUMEL


def hsdp(compressor: Any = None, **options: Any) -> LowBitFSDPStrategy:
    compressor = compressor if compressor is not None else LoCo(block_size=32)
    chosen: dict[str, Any] = {"shard_size": "node", "min_shard_numel": MIN_SHARD_NUMEL} | options
    return LowBitFSDPStrategy(compressor, **chosen)


class Run(NamedTuple):
    """What a rank has come to, and among how many others that get compressed messages of it, out of how many."""

    losses: list[float]
    bits: int
    steps: int
    peers: int
    world_size: int

    @classmethod
    def of(cls, losses: list[float], model: nn.Module, sync: Any) -> Run:
        return cls(losses, fingerprint(model), sync.step_index, sync.ranks.peers.world_size, sync.ranks.world_size)
