"""Strategies for ``lightning.pytorch``. `lowbit_strategy.pytorch_lightning` has the same for that package."""

from lowbit_strategy.lightning.callbacks import AdaptiveCompression, CompressionMonitor
from lowbit_strategy.lightning.strategies import LowBitDDPStrategy, LowBitFSDPStrategy

__all__ = ["AdaptiveCompression", "CompressionMonitor", "LowBitDDPStrategy", "LowBitFSDPStrategy"]
