"""The same as `lowbit_strategy.lightning` for the ``pytorch_lightning`` package, whose base classes are its own."""

from __future__ import annotations

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.lightning.adaptive import AdaptiveCompressionMixin
from lowbit_strategy.lightning.ddp import LowBitDDPMixin
from lowbit_strategy.lightning.fsdp import LowBitFSDPMixin
from lowbit_strategy.lightning.monitor import CompressionMonitorMixin
from lowbit_strategy.options.documentation import documented_options

__all__ = ["AdaptiveCompression", "CompressionMonitor", "LowBitDDPStrategy", "LowBitFSDPStrategy"]


@documented_options(SyncOptions)
class LowBitDDPStrategy(LowBitDDPMixin, DDPStrategy):
    """DDP with compressed gradient synchronisation, as `lowbit_strategy.lightning.LowBitDDPStrategy`.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, outer and the others that are for DDP; what they do is filled in from there.
    """


@documented_options(SyncOptions)
class LowBitFSDPStrategy(LowBitFSDPMixin, ModelParallelStrategy):
    """FSDP2 with compressed gradient reduce-scatter, as `lowbit_strategy.lightning.LowBitFSDPStrategy`.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, weights, shard_size and all others; what they do is filled in from there.
    """


class CompressionMonitor(CompressionMonitorMixin, Callback):
    """See `lowbit_strategy.lightning.CompressionMonitor`."""


class AdaptiveCompression(AdaptiveCompressionMixin, Callback):
    """See `lowbit_strategy.lightning.AdaptiveCompression`."""
