"""Controllers and monitors under an accelerator: one control for each prepared model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from lowbit_strategy.accelerate.clock import TrainingClock
from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.telemetry.metric_names import for_model


class AcceleratorLoop:
    """State that an accelerator's models share: the loop's progress, the metrics' receiver, the record's folder.

    Args:
        plugin: The `LowBitPlugin`.
        accelerator: The accelerator whose models are trained.

    Attributes:
        clock: Counts steps and epochs.
        log: Receives metrics and their step, on every rank.
        has_log: Returns whether anything receives them.
        folder: Folder of the record; None: there is none.
        accumulates: Whether the loop uses ``accelerator.accumulate``.
    """

    def __init__(self, plugin: Any, accelerator: Accelerator) -> None:
        self.plugin = plugin
        self.accelerator = accelerator
        self.clock = TrainingClock(accelerator, plugin.num_steps, plugin.steps_per_epoch)
        self.log: Callable[[dict[str, float], int], Any] = accelerator.log
        self.has_log: Callable[[], bool] = lambda: bool(accelerator.trackers)
        record = accelerator.logging_dir if plugin.record is True else plugin.record
        self.folder = None if record is None or record is False else Path(record)
        self.accumulates = False

    def control(self, sync: GradientSync, number: int, *, alone: bool) -> PreparedControl | None:
        """Make the control of the model with this number, before a checkpoint is loaded into it. `alone`: whether no
        other model is in use. Returns None if the plugin has neither a controller nor a monitor.

        Raises:
            ValueError: The controller does not support the model.
        """
        controller = self.plugin.controller
        if controller is None and self.plugin.monitor is None:
            return None
        if controller is not None and controller.initial_accumulation is not None and not alone:
            raise ValueError(
                f"{type(controller).__name__} changes gradient accumulation, which all models of an Accelerator"
                " share: use it with one model, or give each model its own Accelerator"
            )
        return PreparedControl(sync, self, number)


class PreparedControl(ModelControl):
    """The control of one prepared model.

    Args:
        sync: The model's engine.
        loop: The loop that trains it.
        number: The model's number, used in metrics and records.
    """

    def __init__(self, sync: GradientSync, loop: AcceleratorLoop, number: int) -> None:
        super().__init__(sync, loop.clock, lambda metrics, step: loop.log(for_model(metrics, number), step))
        self.has_log = lambda: loop.has_log()
        self._loop, self._number = loop, number
        if loop.plugin.controller is not None:
            self.adapt(loop.plugin.controller)
            sync.save_with("clock", loop.clock)
        if loop.plugin.monitor is not None:
            self.monitor(loop.plugin.monitor)
        self.take_effect()

    def begin(self, **fields: Any) -> None:
        """Training begins or continues.

        Raises:
            ValueError: The controller changes gradient accumulation, and the loop does not accumulate.
        """
        loop = self._loop
        controller = loop.plugin.controller
        if controller is not None and controller.initial_accumulation is not None and not loop.accumulates:
            raise ValueError(
                f"{type(controller).__name__} changes gradient accumulation: put forward, backward and the"
                " optimizer's step inside `with accelerator.accumulate(model):`"
            )
        if loop.folder is not None:
            self.folder = loop.folder if self._number == 0 else loop.folder / f"model_{self._number}"
        super().begin(**fields)

    @property
    def accumulation(self) -> int:
        return int(self._loop.accelerator.gradient_accumulation_steps)

    @accumulation.setter
    def accumulation(self, batches: int) -> None:
        self._loop.accelerator.gradient_accumulation_steps = batches
        self._loop.accelerator.step = 0  # count windows from here
