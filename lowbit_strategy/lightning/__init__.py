"""Strategies for ``lightning.pytorch``; `lowbit_strategy.pytorch_lightning` has the same for the other name."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.lightning.adaptive import AdaptiveCompressionMixin
from lowbit_strategy.lightning.ddp import LowBitDDPMixin
from lowbit_strategy.lightning.fsdp import LowBitFSDPMixin
from lowbit_strategy.lightning.monitor import CompressionMonitorMixin
from lowbit_strategy.options.documentation import documented_options

__all__ = ["AdaptiveCompression", "CompressionMonitor", "LowBitDDPStrategy", "LowBitFSDPStrategy"]


@documented_options(SyncOptions)
class LowBitDDPStrategy(LowBitDDPMixin, DDPStrategy):
    """DDP with compressed gradient synchronisation.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, outer and the others that are for DDP; what they do is filled in from there.
        kwargs: As for ``DDPStrategy``, without its hooks. In a notebook ``start_method="fork"`` (the name
            ``loco_ddp_notebook``) trains on several processes; with ``"fork"`` and ``"spawn"`` save with
            ``ModelCheckpoint``: when ``fit`` has returned, the processes have ended and their residuals are gone.

    With one rank nothing is compressed.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option is out of range, or a communication hook is given.
    """


@documented_options(SyncOptions)
class LowBitFSDPStrategy(LowBitFSDPMixin, ModelParallelStrategy):
    """FSDP2 with compressed gradient reduce-scatter, for any LightningModule: no ``configure_model`` needed.

    Entries of module lists and sequences with at least ``min_shard_numel`` parameters are sharded one by one, the rest
    as one module. A module that shards itself in ``configure_model`` is taken as it is. With one rank nothing is
    compressed. ``sync_batchnorm=True`` works; callbacks that average weights in a copy of the module are refused.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, weights, shard_size and all others; what they do is filled in from there.
        min_shard_numel: Smallest block that is gathered and reduced by itself. Smaller: less memory, more messages.
        save_distributed_checkpoint: True: a folder of shards; False: one full file, which ``load_from_checkpoint``
            reads.
        process_group_backend, timeout: As for ``ModelParallelStrategy``.

    Raises:
        TypeError: An option is unknown, or one of FSDP1 (the message names what to do instead).
        ValueError: An option is out of range.
    """


class CompressionMonitor(CompressionMonitorMixin, Callback):
    """What compression does to the gradients, in the trainer's loggers and progress bar.

    On every n-th step, over all ranks: relative error and cosine similarity of what was sent against gradient plus
    residual, residual norm, bits per element, bytes on the wire, milliseconds in codecs and in waiting for bytes; in
    total and by group. Between those steps it does nothing. `lowbit report` draws what it records.

    Args:
        every_n_steps: Optimizer steps from one observation to the next. An observation costs about as much as the
            compression of one step.
        group_by: ``kind`` (the same layer of all blocks together), ``module``, ``parameter``, or a function of the
            parameter's name.
        bounds: Warn when a group leaves them; `lowbit_strategy.control.Guard` falls back as well.
        progress_bar: Show error and bits in the progress bar.
        record: Write ``lowbit.jsonl`` into the logger's folder, or into the folder given. One run has one record: both
            callbacks write into the same.

    Raises:
        TypeError: `bounds` is not a `Bounds`.
        ValueError: `every_n_steps` is not positive, or the strategy does not compress.
    """


class AdaptiveCompression(AdaptiveCompressionMixin, Callback):
    """Lets a controller choose compressors while the model trains; its choice replaces the strategy's compressor.

    Args:
        controller: One of `lowbit_strategy.control`, such as ``Accordion(light=LoCo(bits=8), heavy=LoCo(bits=2))``.
        record: Write decisions to ``lowbit.jsonl`` in the logger's folder, or in the folder given.

    Raises:
        TypeError: `controller` is not one of `lowbit_strategy.control`.
        ValueError: The controller cannot serve the model, there is another one, or the strategy does not compress.
    """
