"""What a plugin is configured with, checked. Knows no `Accelerator`."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from lowbit_strategy.accelerate.monitor import CompressionMonitor
from lowbit_strategy.checkpoint.capture import OnWorldSizeChange
from lowbit_strategy.checkpoint.resume import OnMissingResidual
from lowbit_strategy.control.base import Controller
from lowbit_strategy.hooks.sync_options import SyncOptions
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.quantization.loco import LoCo
from lowbit_strategy.methods.registry import as_compressor


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """The fields of `lowbit_strategy.accelerate.LowBitPlugin`, which describes them.

    Raises:
        TypeError: `compressor`, `controller`, `monitor` or `record` is of another type.
        ValueError: An option is out of range, or no preset has the name that is given as `compressor`.
    """

    compressor: Compressor = field(default_factory=LoCo)
    _: KW_ONLY
    seed: int = 0
    on_world_size_change: OnWorldSizeChange = "reset"
    on_missing_residual: OnMissingResidual = "error"
    check_digest: bool = True
    controller: Controller | None = None
    monitor: CompressionMonitor | None = None
    record: bool | str | Path = True
    num_steps: int | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", as_compressor(self.compressor))
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
        """The fields that are about synchronisation."""
        own = {entry.name for entry in dataclasses.fields(self)}
        names = [entry.name for entry in dataclasses.fields(SyncOptions) if entry.name in own]
        return SyncOptions(**{name: getattr(self, name) for name in names})
