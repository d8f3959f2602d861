"""The plugin: what to do about compression, to be attached to an `Accelerator`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowbit_strategy.accelerate.monitor import CompressionMonitor
from lowbit_strategy.checkpoint.capture import OnWorldSizeChange
from lowbit_strategy.control.base import Controller
from lowbit_strategy.hooks.attach import SyncOptions
from lowbit_strategy.methods._base.base import Compressor
from lowbit_strategy.methods.quantization.loco import LoCo

if TYPE_CHECKING:
    from lowbit_strategy.accelerate.binding import Binding


@dataclass(frozen=True, slots=True)
class LowBitPlugin:
    """Compressed gradient synchronisation for Accelerate; pure configuration, so one plugin serves any number.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default.
        seed: Of stochastic rounding and selection; the same on all ranks.
        on_world_size_change: Resuming on another number of ranks: ``reset`` or ``fold``, see `SyncOptions`.
        on_missing_residual: A checkpoint's residual file is missing or damaged: ``error`` or ``reset``.
        controller: One of `lowbit_strategy.control`: chooses compressors in the place of `compressor`.
        monitor: Logs what compression does through `Accelerator.log`, or the HF Trainer's.
        record: Folder of the record that `lowbit report` draws. True: the accelerator's logging folder (its
            ``project_dir``) or the HF Trainer's ``output_dir``, if there is one; False: none.
        num_steps: Optimizer steps planned, for phases in fractions; the HF Trainer knows them.
        steps_per_epoch: Optimizer steps of an epoch, where it is not a prepared data loader that ends one.

    Raises:
        TypeError: `compressor`, `controller` or `monitor` is none.
        ValueError: An option is out of range.
    """

    compressor: Compressor = field(default_factory=LoCo)
    _: KW_ONLY
    seed: int = 0
    on_world_size_change: OnWorldSizeChange = "reset"
    on_missing_residual: Literal["error", "reset"] = "error"
    controller: Controller | None = None
    monitor: CompressionMonitor | None = None
    record: bool | str | Path = True
    num_steps: int | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise TypeError(f"compressor must be a configuration such as LoCo(bits=4), got {self.compressor!r}")
        if self.controller is not None and not isinstance(self.controller, Controller):
            raise TypeError(f"controller must be one of lowbit_strategy.control, got {self.controller!r}")
        if self.monitor is not None and not isinstance(self.monitor, CompressionMonitor):
            raise TypeError(f"monitor must be a CompressionMonitor, got {self.monitor!r}")
        if not isinstance(self.record, (bool, str, Path)):
            raise TypeError(f"record must be true, false or a folder, got {self.record!r}")
        for name in ("num_steps", "steps_per_epoch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        self.sync_options()

    def sync_options(self) -> SyncOptions:
        return SyncOptions(
            seed=self.seed,
            on_world_size_change=self.on_world_size_change,
            on_missing_residual=self.on_missing_residual,
        )

    def attach(self, accelerator: Any, *, fsdp_plugin: Any = None) -> Binding:
        """From now on what `accelerator` prepares is synchronised compressed.

        Args:
            accelerator: An `accelerate.Accelerator` that has prepared nothing yet.
            fsdp_plugin: The `FullyShardedDataParallelPlugin` that the accelerator was made with. Needed on CPU only:
                Accelerate forgets it there and would train with DDP instead.

        Raises:
            ValueError: The accelerator has prepared a model, has a plugin already, or runs in a way that cannot be
                served.
        """
        from lowbit_strategy.accelerate.binding import Binding

        return Binding(self, accelerator, fsdp_plugin=fsdp_plugin)
