"""Fabric: strategies for ``lightning.fabric``. `lowbit_strategy.lightning_fabric` is the same for the other name."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.fabric.custom_loop import adapt, monitor
from lowbit_strategy.fabric.ddp import LowBitFabricDDPMixin
from lowbit_strategy.fabric.fsdp import LowBitFabricFSDPMixin

__all__ = ["LowBitDDPStrategy", "LowBitFSDPStrategy", "adapt", "monitor"]


class LowBitDDPStrategy(LowBitFabricDDPMixin, DDPStrategy):
    """DDP with compressed gradient synchronisation; arguments as `lowbit_strategy.lightning.LowBitDDPStrategy`."""


class LowBitFSDPStrategy(LowBitFabricFSDPMixin, ModelParallelStrategy):
    """FSDP2 with compressed reduce-scatter; arguments as `lowbit_strategy.lightning.LowBitFSDPStrategy`."""
