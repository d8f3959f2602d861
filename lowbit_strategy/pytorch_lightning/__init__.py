"""The same as `lowbit_strategy.lightning` for the ``pytorch_lightning`` package, whose base classes are its own."""

from __future__ import annotations

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.lightning.callbacks import AdaptiveCompressionMixin, CompressionMonitorMixin
from lowbit_strategy.lightning.strategies import LowBitDDPMixin, LowBitFSDPMixin

__all__ = ["AdaptiveCompression", "CompressionMonitor", "LowBitDDPStrategy", "LowBitFSDPStrategy"]


class LowBitDDPStrategy(LowBitDDPMixin, DDPStrategy):
    __doc__ = LowBitDDPMixin.__doc__


class LowBitFSDPStrategy(LowBitFSDPMixin, ModelParallelStrategy):
    __doc__ = LowBitFSDPMixin.__doc__


class CompressionMonitor(CompressionMonitorMixin, Callback):
    __doc__ = CompressionMonitorMixin.__doc__


class AdaptiveCompression(AdaptiveCompressionMixin, Callback):
    __doc__ = AdaptiveCompressionMixin.__doc__
