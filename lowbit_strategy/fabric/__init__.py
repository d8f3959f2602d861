"""Fabric: strategies for ``lightning.fabric``. `lowbit_strategy.lightning_fabric` is the same for that package."""

from lowbit_strategy.fabric.adapt import adapt, monitor
from lowbit_strategy.fabric.strategies import LowBitDDPStrategy, LowBitFSDPStrategy

__all__ = ["LowBitDDPStrategy", "LowBitFSDPStrategy", "adapt", "monitor"]
