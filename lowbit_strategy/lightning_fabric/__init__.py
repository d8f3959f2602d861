"""The same as `lowbit_strategy.fabric` for the ``lightning_fabric`` package, whose base classes are its own."""

from __future__ import annotations

from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.fabric.adapt import adapt, monitor
from lowbit_strategy.fabric.strategies import LowBitFabricDDPMixin, LowBitFabricFSDPMixin

__all__ = ["LowBitDDPStrategy", "LowBitFSDPStrategy", "adapt", "monitor"]


class LowBitDDPStrategy(LowBitFabricDDPMixin, DDPStrategy):
    __doc__ = LowBitFabricDDPMixin.__doc__


class LowBitFSDPStrategy(LowBitFabricFSDPMixin, ModelParallelStrategy):
    __doc__ = LowBitFabricFSDPMixin.__doc__
