"""The same as `lowbit_strategy.lightning` for the ``pytorch_lightning`` package, whose base classes are its own."""

from __future__ import annotations

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.lightning.adaptive import AdaptiveCompressionMixin
from lowbit_strategy.lightning.ddp import LowBitDDPMixin
from lowbit_strategy.lightning.fsdp import LowBitFSDPMixin
from lowbit_strategy.lightning.monitor import CompressionMonitorMixin

__all__ = ["AdaptiveCompression", "CompressionMonitor", "LowBitDDPStrategy", "LowBitFSDPStrategy"]


class LowBitDDPStrategy(LowBitDDPMixin, DDPStrategy):
    """See `lowbit_strategy.lightning.LowBitDDPStrategy`."""


class LowBitFSDPStrategy(LowBitFSDPMixin, ModelParallelStrategy):
    """See `lowbit_strategy.lightning.LowBitFSDPStrategy`."""


class CompressionMonitor(CompressionMonitorMixin, Callback):
    """See `lowbit_strategy.lightning.CompressionMonitor`."""


class AdaptiveCompression(AdaptiveCompressionMixin, Callback):
    """See `lowbit_strategy.lightning.AdaptiveCompression`."""
