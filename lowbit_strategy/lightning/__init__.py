"""Strategies for ``lightning.pytorch``; `lowbit_strategy.pytorch_lightning` has the same for the other name."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

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
