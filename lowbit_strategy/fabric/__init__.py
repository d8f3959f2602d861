"""Fabric: strategies for ``lightning.fabric``. `lowbit_strategy.lightning_fabric` is the same for the other name."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.fabric.custom_loop import adapt, monitor
from lowbit_strategy.fabric.ddp import LowBitFabricDDPMixin
from lowbit_strategy.fabric.fsdp import LowBitFabricFSDPMixin
from lowbit_strategy.options.documentation import documented_options

__all__ = ["LowBitDDPStrategy", "LowBitFSDPStrategy", "adapt", "monitor"]


@documented_options(SyncOptions)
class LowBitDDPStrategy(LowBitFabricDDPMixin, DDPStrategy):
    """DDP with compressed gradient synchronisation. With one rank nothing is compressed.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, outer and the others that are for DDP; what they do is filled in from there.
        kwargs: As for Fabric's ``DDPStrategy``.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option is out of range, or a communication hook is given.
    """


@documented_options(SyncOptions)
class LowBitFSDPStrategy(LowBitFabricFSDPMixin, ModelParallelStrategy):
    """FSDP2 with compressed gradient reduce-scatter, for any module. With one rank nothing is compressed.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, weights, shard_size and all others; what they do is filled in from there.
        min_shard_numel: Smallest block that is gathered and reduced by itself. Smaller: less memory, more messages.
        save_distributed_checkpoint: True: a folder of shards; False: one full file.
        process_group_backend, timeout: As for ``ModelParallelStrategy``.

    Raises:
        TypeError: An option is unknown, or one of FSDP1 (the message names what to do instead).
        ValueError: An option is out of range.
    """
