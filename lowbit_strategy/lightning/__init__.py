"""Strategies for ``lightning.pytorch``; `lowbit_strategy.pytorch_lightning` has the same for the other name."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.lightning.ddp import LowBitDDPMixin
from lowbit_strategy.lightning.fsdp import LowBitFSDPMixin

__all__ = ["LowBitDDPStrategy", "LowBitFSDPStrategy"]


class LowBitDDPStrategy(LowBitDDPMixin, DDPStrategy):
    """DDP with compressed gradient synchronisation.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default.
        seed: Of stochastic rounding and selection.
        on_world_size_change: Resuming on another number of ranks: ``reset`` or ``fold``, see `SyncOptions`.
        on_missing_residual: A checkpoint's residual file is missing or damaged: ``error`` or ``reset``.
        kwargs: As for ``DDPStrategy``; hooks excepted.

    Raises:
        ValueError: An option is out of range, or a communication hook is given.
    """


class LowBitFSDPStrategy(LowBitFSDPMixin, ModelParallelStrategy):
    """FSDP2 with compressed gradient reduce-scatter, for any LightningModule: no ``configure_model`` needed.

    Entries of module lists and sequences with at least ``min_shard_numel`` parameters are sharded one by one, the rest
    as one module. A module that shards itself in ``configure_model`` is taken as it is.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default.
        seed: Of stochastic rounding and selection.
        on_world_size_change: Resuming on another number of ranks: ``reset`` or ``fold``, see `SyncOptions`.
        on_missing_residual: A checkpoint's residual file is missing or damaged: ``error`` or ``reset``.
        min_shard_numel: Smallest block that is gathered and reduced by itself. Smaller: less memory, more messages.
        save_distributed_checkpoint: True: a folder of shards; False: one full file, which ``load_from_checkpoint``
            reads.
        process_group_backend, timeout: As for ``ModelParallelStrategy``.
    """
