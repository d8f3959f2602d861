"""Controllers and monitors under an accelerator: one control for each prepared model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from lowbit_strategy.accelerate.clock import TrainingClock
from lowbit_strategy.adaptation.model_control import Log, ModelControl
from lowbit_strategy.control.base import Progress
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.telemetry.metric_names import for_model


class AcceleratorLoop:
    """State that an accelerator's models share: the loop's progress, the metrics' receiver, the record's folder.

    Args:
        plugin: The `LowBitPlugin`.
        accelerator: The accelerator whose models are trained.

    Attributes:
        clock: Counts steps and epochs.
        folder: Folder of the record; None: there is none.
        accumulates: Whether the loop uses ``accelerator.accumulate``.
    """

    def __init__(self, plugin: Any, accelerator: Accelerator) -> None:
        self.plugin = plugin
        self.accelerator = accelerator
        self.clock = TrainingClock(accelerator, plugin.num_steps, plugin.steps_per_epoch)
        self._trainers_log: Log | None = None
        record = accelerator.logging_dir if plugin.record is True else plugin.record
        self.folder = None if record is None or record is False else Path(record)
        self.accumulates = False

    def follow_trainer(self, log: Log, folder: Path, num_steps: int | None) -> None:
        """The HF Trainer trains the models. `folder`: its output folder; `num_steps`: None if nothing is trained."""
        self._trainers_log = log
        if self.plugin.record is True:
            self.folder = folder
        if self.plugin.num_steps is None and num_steps is not None:
            self.clock.num_steps = num_steps

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics. Called on every rank."""
        (self._trainers_log or self.accelerator.log)(metrics, step)

    @property
    def has_log(self) -> bool:
        """Whether anything receives what is logged. The HF Trainer has its own history at least."""
        return self._trainers_log is not None or bool(self.accelerator.trackers)

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
        super().__init__(sync)
        self._loop, self._number = loop, number
        if loop.plugin.controller is not None:
            self.adapt(loop.plugin.controller)
            sync.save_with("clock", loop.clock)
        if loop.plugin.monitor is not None:
            self.monitor(loop.plugin.monitor)
        self.take_effect()

    def clock(self, step: int) -> Progress:
        return self._loop.clock(step)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._loop.log(for_model(metrics, self._number), step)

    @property
    def has_log(self) -> bool:
        return self._loop.has_log

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
