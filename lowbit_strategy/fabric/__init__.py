"""Fabric: strategies for ``lightning.fabric``. `lowbit_strategy.lightning_fabric` is the same for the other name."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.fabric.adapt import adapt, monitor
from lowbit_strategy.fabric.strategies import LowBitFabricDDPMixin, LowBitFabricFSDPMixin

__all__ = ["LowBitDDPStrategy", "LowBitFSDPStrategy", "adapt", "monitor"]


class LowBitDDPStrategy(LowBitFabricDDPMixin, DDPStrategy):
    __doc__ = LowBitFabricDDPMixin.__doc__


class LowBitFSDPStrategy(LowBitFabricFSDPMixin, ModelParallelStrategy):
    __doc__ = LowBitFabricFSDPMixin.__doc__
