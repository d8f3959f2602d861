"""Controllers and monitors under a Trainer: what both callbacks share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.control.base import Controller, Progress
from lowbit_strategy.engine.engine import GradientSync


class LightningControl(ModelControl):
    """The control of a Trainer's model. A finder trains without callbacks, so its trials are not reported.

    Args:
        sync: The engine.
        trainer: Trains the model.
    """

    def __init__(self, sync: GradientSync, trainer: Any) -> None:
        super().__init__(sync)
        self._trainer = trainer
        self._max_steps = trainer.max_steps  # a learning rate finder changes it for its own steps
        self._length: tuple[int | None, int | None] | None = None  # optimizer steps of the run and of an epoch

    def log(self, metrics: dict[str, float], step: int) -> None:
        for logger in self._trainer.loggers:  # regardless of the loggers' interval: the metrics are this step's
            logger.log_metrics(dict(metrics), step=step)

    @property
    def has_log(self) -> bool:
        return bool(self._trainer.loggers)

    def clock(self, step: int) -> Progress:
        if self._length is None:
            self._measure_early()
        num_steps, steps_per_epoch = self._length or (None, None)
        epoch = self._trainer.current_epoch
        return Progress(step=step, epoch=epoch, num_steps=num_steps, steps_per_epoch=steps_per_epoch)

    def _measure_run(self) -> None:
        """Store the run's length, which the Trainer knows once training begins."""
        trainer = self._trainer
        total, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
        self._length = (
            int(total) if 0 < total < math.inf else None,
            math.ceil(batches / trainer.accumulate_grad_batches) if 0 < batches < math.inf else None,
        )

    def _measure_early(self) -> None:
        """Store the coming run's length for a finder, which trains before training begins, without callbacks."""
        loop = self._trainer.fit_loop.epoch_loop
        present, loop.max_steps = loop.max_steps, self._max_steps
        try:
            self._measure_run()
        finally:
            loop.max_steps = present

    @property
    def _callbacks(self) -> list[Any]:
        """This control's callbacks that are currently called."""
        return [each for each in self._trainer.callbacks if getattr(each, "control", None) is self]

    def begin(self, **fields: Any) -> None:
        """Training begins or continues. Called on all ranks, since finding the logger's folder is collective.

        Raises:
            ValueError: The callbacks name different folders, or the controller cannot change the batch here.
        """
        if not self._callbacks:
            return
        if self.driver is not None and self.driver.controller.initial_accumulation is not None:
            _check_accumulation(self.driver.controller, self._trainer)
        self._measure_run()
        self.folder = self._find_folder()
        super().begin(strategy=type(self._trainer.strategy).__name__, **fields)

    def _find_folder(self) -> Path | None:
        trainer, asked = self._trainer, [each.record for each in self._callbacks if each.record is not False]
        own = trainer.log_dir if True in asked and trainer.loggers else None
        folders = dict.fromkeys(own if record is True else str(record) for record in asked)
        named = [folder for folder in folders if folder is not None]
        if len(named) > 1:
            raise ValueError(
                f"a run has one record, but its callbacks name several folders, {' and '.join(map(repr, named))}: give"
                " both callbacks the same record="
            )
        return Path(named[0]) if named else None

    @property
    def accumulation(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    @accumulation.setter
    def accumulation(self, batches: int) -> None:
        self._trainer.accumulate_grad_batches = batches

    def end_step(self, *, counted: bool) -> None:
        if self._callbacks:
            super().end_step(counted=counted)


def _check_accumulation(controller: Controller, trainer: Any) -> None:
    """Raise a ValueError if the controller changes gradient accumulation, but the Trainer does not accumulate or
    something else changes it.
    """
    name = type(controller).__name__
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"{name} changes gradient accumulation, which manual optimization handles itself: set"
            " automatic_optimization to True, or use a controller that does not change the batch, such as Accordion"
        )
    kinds = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
    if "GradientAccumulationScheduler" in kinds:
        raise ValueError(
            f"{name} changes gradient accumulation, and so does GradientAccumulationScheduler: leave one of them out"
        )
