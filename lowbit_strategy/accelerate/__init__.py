"""Hugging Face Accelerate: a plugin for any `Accelerator`, and an `Accelerator` that takes one.

accelerator = Accelerator()
LowBitPlugin(LoCo(bits=4)).attach(accelerator)     # before accelerator.prepare

accelerator = LowBitAccelerator(lowbit_plugin=LowBitPlugin(LoCo(bits=4)))      # the same
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from lowbit_strategy.accelerate.binding import Binding, binding_of
from lowbit_strategy.adaptation.monitor_options import MonitorOptions
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.control.base import Controller, describe, labels
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration

__all__ = ["Binding", "LowBitAccelerator", "LowBitPlugin", "MonitorOptions", "binding_of"]

_NOT_CHOSEN = LoCo()


@configuration
class LowBitPlugin(SyncOptions):
    """Compressed gradient synchronization for Accelerate. It is pure configuration, so one plugin can be attached to
    several accelerators.

    It also has the fields of `SyncOptions`.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        controller: One of `lowbit_strategy.control`, which chooses compressors in place of `compressor`.
        monitor: Logs the effects of compression through `Accelerator.log`, or the HF Trainer's.
        record: Folder of the record that `lowbit report` draws. True: the accelerator's logging folder (its
            ``project_dir``) or the HF Trainer's ``output_dir``, if there is one. False: no record.
        num_steps: Number of planned optimizer steps, needed for phases given as fractions. The HF Trainer knows it.
        steps_per_epoch: Optimizer steps per epoch, if epochs do not end with a prepared data loader.

    Raises:
        ValueError: An option has the wrong type or is out of range, or there is no preset called `compressor`.
    """

    compressor: Compressor = field(default_factory=lambda: _NOT_CHOSEN, kw_only=False)
    controller: Controller | None = None
    monitor: MonitorOptions | None = None
    record: bool | str | Path = True
    num_steps: int | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compressor is _NOT_CHOSEN:
            object.__setattr__(self, "compressor", self.default_compressor)
        for name in ("num_steps", "steps_per_epoch"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))

    def sync_options(self) -> SyncOptions:
        """The fields of this plugin that belong to `SyncOptions`."""
        return SyncOptions(**{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(SyncOptions)})

    def hyper_parameters(self) -> dict[str, str]:
        """The values that trackers show and filter runs by."""
        found = {"lowbit/compressor": describe(self.compressor)}
        if self.controller is not None:
            levels = ", ".join(labels(self.controller.levels))
            found = {"lowbit/controller": type(self.controller).__name__, "lowbit/levels": levels}
        return found | self.chosen

    def attach(self, accelerator: Any, *, fsdp_plugin: Any = None) -> Binding:
        """Compress the gradients of the models that `accelerator` prepares from now on.

        Args:
            accelerator: An `accelerate.Accelerator` that has prepared nothing yet.
            fsdp_plugin: The `FullyShardedDataParallelPlugin` with which the accelerator was made. Needed only on CPU,
                where Accelerate drops it and would train with DDP instead.

        Raises:
            ValueError: The accelerator has prepared a model, already has a plugin, or runs in an unsupported way.
        """
        return Binding(self, accelerator, fsdp_plugin=fsdp_plugin)


class LowBitAccelerator(Accelerator):
    """An `accelerate.Accelerator` with compressed gradient synchronization.

    Args:
        args, kwargs: See `accelerate.Accelerator`.
        lowbit_plugin: The configuration; by default `LowBitPlugin()`, which is 4-bit LoCo.
    """

    def __init__(self, *args: Any, lowbit_plugin: LowBitPlugin | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plugin = lowbit_plugin if lowbit_plugin is not None else LowBitPlugin()
        plugin.attach(self, fsdp_plugin=kwargs.get("fsdp_plugin"))
