"""The same as `lowbit_strategy.fabric` for the ``lightning_fabric`` package, whose base classes are its own."""

from __future__ import annotations

from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.fabric.custom_loop import adapt, monitor
from lowbit_strategy.fabric.ddp import LowBitFabricDDPMixin
from lowbit_strategy.fabric.fsdp import LowBitFabricFSDPMixin
from lowbit_strategy.options.documentation import documented_options

__all__ = ["LowBitDDPStrategy", "LowBitFSDPStrategy", "adapt", "monitor"]


@documented_options(SyncOptions)
class LowBitDDPStrategy(LowBitFabricDDPMixin, DDPStrategy):
    """DDP with compressed gradient synchronisation, as `lowbit_strategy.fabric.LowBitDDPStrategy`.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, outer and the others that are for DDP; what they do is filled in from there.
    """


@documented_options(SyncOptions)
class LowBitFSDPStrategy(LowBitFabricFSDPMixin, ModelParallelStrategy):
    """FSDP2 with compressed gradient reduce-scatter, as `lowbit_strategy.fabric.LowBitFSDPStrategy`.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, weights, shard_size and all others; what they do is filled in from there.
    """
