"""The plugin: what to do about compression, to be attached to an `Accelerator`."""

from __future__ import annotations

from typing import Any

from lowbit_strategy.accelerate.binding import Binding
from lowbit_strategy.accelerate.options import PluginOptions
from lowbit_strategy.options.configuration import positional_configuration


@positional_configuration
class LowBitPlugin(PluginOptions):
    """Compressed gradient synchronisation for Accelerate; pure configuration, so one plugin serves any number.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        seed: Of stochastic rounding and selection; the same on all ranks.
        on_world_size_change: Resuming on another number of ranks: ``reset`` or ``fold``, see `SyncOptions`.
        on_missing_residual: A checkpoint's residual file is missing or damaged: ``error`` or ``reset``.
        check_digest: DDP: compare a digest of the parameters over the ranks now and then, see `SyncOptions`.
        two_level: Add gradients up exactly inside a node and compress between nodes, see `SyncOptions`.
        shard_size: FSDP2: shard over so many ranks of a node (``"node"``: all) and compress between the replicas, as
            ``dp_replicate_size`` of Accelerate's parallelism configuration, which may be given instead.
        weights: FSDP2: how weights travel: `Exact`, `WeightCode` or `WeightDelta`, or a name such as ``"delta4"``.
            None: codes of 8 bits with LoCo, exactly with other compressors.
        outer: Local steps with an outer optimizer between synchronisations, such as ``DiLoCo(every=30)``; see
            `SyncOptions`.
        memory: GB per rank that compression may keep, see `SyncOptions`.
        controller: One of `lowbit_strategy.control`: chooses compressors in the place of `compressor`.
        monitor: Logs what compression does through `Accelerator.log`, or the HF Trainer's.
        record: Folder of the record that `lowbit report` draws. True: the accelerator's logging folder (its
            ``project_dir``) or the HF Trainer's ``output_dir``, if there is one; False: none.
        num_steps: Optimizer steps planned, for phases in fractions; the HF Trainer knows them.
        steps_per_epoch: Optimizer steps per epoch, where it is not a prepared data loader that ends one.

    Raises:
        ValueError: An option is of another type or out of range, or no preset has the name given as `compressor`.
    """

    def attach(self, accelerator: Any, *, fsdp_plugin: Any = None) -> Binding:
        """Compress the gradients of the models that `accelerator` prepares from now on.

        Args:
            accelerator: An `accelerate.Accelerator` that has prepared nothing yet.
            fsdp_plugin: The `FullyShardedDataParallelPlugin` that the accelerator was made with. Needed on CPU only:
                Accelerate forgets it there and would train with DDP instead.

        Raises:
            ValueError: The accelerator has prepared a model, has a plugin already, or runs in a way that cannot be
                served.
        """
        return Binding(self, accelerator, fsdp_plugin=fsdp_plugin)
