"""What both callbacks share: a Trainer's moments for one `ModelControl`. Independent of the Lightning namespace."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit_strategy.control.base import Progress
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.telemetry.model_control import ModelControl

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = ABC

Where = bool | str | Path


class TrainerClock:
    """The progress of a Trainer's run; called with the number of completed optimizer steps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_steps: int | None = None
        self._steps_per_epoch: int | None = None

    def measure_run(self) -> None:
        """Training begins: by now the Trainer knows its length."""
        trainer = self._trainer
        total, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
        per_step = trainer.accumulate_grad_batches
        self._num_steps = int(total) if 0 < total < math.inf else None
        self._steps_per_epoch = math.ceil(batches / per_step) if 0 < batches < math.inf else None

    def __call__(self, step: int) -> Progress:
        optimizers = self._trainer.optimizers
        return Progress(
            step=step,
            epoch=self._trainer.current_epoch,
            num_steps=self._num_steps,
            steps_per_epoch=self._steps_per_epoch,
            learning_rate=optimizers[0].param_groups[0]["lr"] if optimizers else None,
        )


class ControlCallbackMixin(_Base):
    """A callback that adds its part, a controller or a monitor, to the control of the Trainer's model.

    Args:
        record: Where the run's record goes: True: the logger's folder, if there is a logger; False: nowhere.
    """

    def __init__(self, record: Where) -> None:
        super().__init__()
        if not isinstance(record, (bool, str, Path)):
            raise TypeError(f"record must be true, false or a folder, got {record!r}")
        self.record = record
        self.control: ModelControl | None = None

    @abstractmethod
    def add_part(self, control: ModelControl) -> None:
        """Give `control` the controller or the monitor; before a checkpoint is loaded."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        listeners = getattr(trainer.strategy, "on_sync", None)
        if listeners is None:
            raise ValueError(
                f"{type(self).__name__} needs compressed gradient synchronisation, but the strategy is"
                f' {type(trainer.strategy).__name__}: use Trainer(strategy="loco_ddp"), "loco_fsdp" or another of'
                " lowbit_strategy"
            )
        self._trainer = trainer
        listeners.append(self._attach)

    def _attach(self, sync: GradientSync) -> None:
        """The engine of the coming fit exists; no checkpoint has been loaded into it."""
        self.control = ModelControl.of(sync) or _control_of(sync, self._trainer)
        self.add_part(self.control)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        control = self.control
        if control is None or control.begun:  # the other callback has begun it
            return
        assert isinstance(control.clock, TrainerClock)
        control.clock.measure_run()
        control.folder = _folder(trainer, control)
        control.begin(strategy=type(trainer.strategy).__name__)
        control.warn_without_audience(log=bool(trainer.loggers))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.control is not None:
            self.control.loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self.control.report()


def _control_of(sync: GradientSync, trainer: Any) -> ModelControl:
    def log(metrics: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:  # at once, whatever the loggers' interval is: the metrics are those of this step
            logger.log_metrics(dict(metrics), step=step)

    control = ModelControl(sync, TrainerClock(trainer), log, reports_at_end_of_step=False)
    control.accumulation = lambda: trainer.accumulate_grad_batches
    return control


def _folder(trainer: Any, control: ModelControl) -> Path | None:
    """Where the callbacks of this control want its record. On all ranks: finding the logger's folder is collective.

    Raises:
        ValueError: They name different folders.
    """
    parts = [each for each in trainer.callbacks if isinstance(each, ControlCallbackMixin) and each.control is control]
    folders = {}
    for part in parts:
        if part.record is True:
            folders[trainer.log_dir if trainer.loggers else None] = part
        elif part.record is not False:
            folders[str(part.record)] = part
    named = [folder for folder in folders if folder is not None]
    if len(named) > 1:
        raise ValueError(
            f"one run has one record, but its callbacks name several folders, {' and '.join(map(repr, named))}: give"
            " both callbacks the same record="
        )
    return Path(named[0]) if named else None
