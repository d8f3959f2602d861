"""What a plugin is configured with, checked. Knows no `Accelerator`."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, field
from pathlib import Path

from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.control.base import Controller
from lowbit_strategy.control.levels import describe, labels
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.outer.registry import default_compressor
from lowbit_strategy.options.configuration import positional_configuration
from lowbit_strategy.telemetry.monitor_options import MonitorOptions

_NOT_CHOSEN = LoCo()


@positional_configuration
class PluginOptions(SyncOptions):
    """The fields of `lowbit_strategy.accelerate.LowBitPlugin`, which describes them.

    Raises:
        ValueError: An option is of another type or out of range, or no preset has the name given as `compressor`.
    """

    compressor: Compressor = field(default_factory=lambda: _NOT_CHOSEN)
    _: KW_ONLY
    rollback: bool | None = field(default=None, init=False)  # follows from the precision
    controller: Controller | None = None
    monitor: MonitorOptions | None = None
    record: bool | str | Path = True
    num_steps: int | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compressor is _NOT_CHOSEN and self.outer is not None:
            object.__setattr__(self, "compressor", default_compressor(self.outer))
        for name in ("num_steps", "steps_per_epoch"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))

    def sync_options(self) -> SyncOptions:
        """The fields that are about synchronization."""
        return SyncOptions(**{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(SyncOptions)})

    def hyper_parameters(self) -> dict[str, str]:
        """What trackers show and filter runs by."""
        found = {"lowbit/compressor": describe(self.compressor)}
        if self.controller is not None:
            levels = ", ".join(labels(self.controller.levels))
            found = {"lowbit/controller": type(self.controller).__name__, "lowbit/levels": levels}
        return found if self.outer is None else found | {"lowbit/outer": type(self.outer).__name__}
