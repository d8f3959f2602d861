"""Both callbacks. They pass a Trainer's events to one `ModelControl`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.adaptation.model_control import ModelControl, MonitorOptions
from lowbit_strategy.control.base import Controller, Progress
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.options.configuration import takes_options_of
from lowbit_strategy.options.conversion import refusing_unknown_options
from lowbit_strategy.telemetry.observe import Observation

from .stock import Callback

Where = bool | str | Path


class TrainerClock:
    """The progress of a Trainer's run, given the number of completed optimizer steps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._max_steps = trainer.max_steps  # a learning rate finder sets another one for its own steps
        self._measured = False
        self._num_steps: int | None = None
        self._steps_per_epoch: int | None = None

    def measure_run(self) -> None:
        """Training begins, so the Trainer now knows its length."""
        self._measured = True
        trainer = self._trainer
        total, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
        per_step = trainer.accumulate_grad_batches
        self._num_steps = int(total) if 0 < total < math.inf else None
        self._steps_per_epoch = math.ceil(batches / per_step) if 0 < batches < math.inf else None

    def _measure_early(self) -> None:
        """A finder trains before training begins, without callbacks: use the length of the coming run."""
        loop = self._trainer.fit_loop.epoch_loop
        present, loop.max_steps = loop.max_steps, self._max_steps
        try:
            self.measure_run()
        finally:
            loop.max_steps = present

    def __call__(self, step: int) -> Progress:
        if not self._measured:
            self._measure_early()
        epoch = self._trainer.current_epoch
        return Progress(step=step, epoch=epoch, num_steps=self._num_steps, steps_per_epoch=self._steps_per_epoch)


class ControlCallback(Callback, ABC):
    """A callback that adds its controller or monitor to the control of the Trainer's model.

    Args:
        record: Where to write the run's record. True: the logger's folder, if there is a logger; False: nowhere.
    """

    def __init__(self, record: Where) -> None:
        super().__init__()
        if not isinstance(record, (bool, str, Path)):
            raise TypeError(f"record must be true, false or a folder, got {record!r}")
        self.record = record
        self.control: ModelControl | None = None

    @abstractmethod
    def add_part(self, control: ModelControl) -> None:
        """Give `control` the controller or the monitor. Called before a checkpoint is loaded."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        listeners = getattr(trainer.strategy, "on_sync", None)
        if listeners is None:
            raise ValueError(
                f"{type(self).__name__} needs compressed gradient synchronization, but the strategy is"
                f' {type(trainer.strategy).__name__}: use Trainer(strategy="loco_ddp"), "loco_fsdp" or another of'
                " lowbit_strategy"
            )
        self._trainer = trainer
        trainer.strategy.on_sync = (*listeners, self._attach)

    def _attach(self, sync: GradientSync) -> None:
        """The engine of the coming fit exists; no checkpoint has been loaded yet."""
        self.control = ModelControl.of(sync) or TrainerControl(sync, self._trainer)
        self.add_part(self.control)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.control is not None and not self.control.begun:  # by the other callback
            self.control.begin()


class TrainerControl(ModelControl):
    """The control of a Trainer's model. A finder trains without callbacks: what it tries is not reported.

    Args:
        sync: The engine.
        trainer: Trains the model.
    """

    def __init__(self, sync: GradientSync, trainer: Any) -> None:
        self._trainer_clock = TrainerClock(trainer)
        super().__init__(sync, self._trainer_clock, self._log)
        self._trainer = trainer
        self.has_log = lambda: bool(trainer.loggers)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        for logger in self._trainer.loggers:  # regardless of the loggers' interval: the metrics are this step's
            logger.log_metrics(dict(metrics), step=step)

    @property
    def _callbacks(self) -> list[ControlCallback]:
        """The callbacks of this control that are called now."""
        return [each for each in self._trainer.callbacks if isinstance(each, ControlCallback) and each.control is self]

    def begin(self, **fields: Any) -> None:
        """Training begins, or goes on. On all ranks: finding the logger's folder is collective.

        Raises:
            ValueError: The callbacks name different folders, or the controller cannot change the batch here.
        """
        if not self._callbacks:
            return
        if self.driver is not None and self.driver.controller.initial_accumulation is not None:
            _check_accumulation(self.driver.controller, self._trainer)
        self._trainer_clock.measure_run()
        self.folder = self._find_folder()
        super().begin(strategy=type(self._trainer.strategy).__name__, **fields)

    def _find_folder(self) -> Path | None:
        trainer, asked = self._trainer, [each.record for each in self._callbacks if each.record is not False]
        own = trainer.log_dir if True in asked and trainer.loggers else None
        folders = dict.fromkeys(own if record is True else str(record) for record in asked)
        named = [folder for folder in folders if folder is not None]
        if len(named) > 1:
            raise ValueError(
                f"one run has one record, but its callbacks name several folders, {' and '.join(map(repr, named))}:"
                " give both callbacks the same record="
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


class CompressionMonitor(ControlCallback):
    """Shows what compression does to the gradients, in the trainer's loggers and progress bar.

    Every n-th step it measures, over all ranks, in total and by group: relative error and cosine similarity of what was
    sent against gradient plus residual, residual norm, bits per element, bytes on the wire, and milliseconds in codecs
    and in waiting for bytes. Between those steps it does nothing. `lowbit report` draws what it records.

    Args:
        args, kwargs: A `MonitorOptions`, or its arguments.
        progress_bar: Show error and bits in the progress bar.
        record: Write ``lowbit.jsonl`` into the logger's folder, or into the given folder. A run has one record, into
            which both callbacks write.

    Raises:
        TypeError: `bounds` is not a `Bounds`.
        ValueError: `every_n_steps` is not positive, or the strategy does not compress.
    """

    @refusing_unknown_options
    @takes_options_of(MonitorOptions)
    def __init__(
        self, *args: int | MonitorOptions, progress_bar: bool = True, record: Where = True, **kwargs: Any
    ) -> None:
        super().__init__(record)
        self.options = MonitorOptions.of(*args, **kwargs)
        self.progress_bar = progress_bar
        self.last: Observation | None = None

    def add_part(self, control: ModelControl) -> None:
        control.monitor(self.options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        observer = self.control.observer if self.control is not None else None
        observation = observer.last if observer is not None else None
        if observation is None or observation is self.last:
            return
        self.last = observation
        if self.progress_bar:
            pl_module.log_dict(
                {"error": observation.total.relative_error, "bits": observation.total.bits_per_element},
                prog_bar=True,
                logger=False,
                on_step=True,
                on_epoch=False,
                batch_size=1,
            )

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.control is None or trainer.sanity_checking:
            return
        self.control.validated(
            {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        )


class AdaptiveCompression(ControlCallback):
    """Lets a controller choose compressors during training, in place of the strategy's compressor.

    Args:
        controller: One of `lowbit_strategy.control`, such as ``Accordion(light=LoCo(bits=8), heavy=LoCo(bits=2))``.
        record: Write decisions to ``lowbit.jsonl`` in the logger's folder, or in the given folder.

    Raises:
        TypeError: `controller` is not one of `lowbit_strategy.control`.
        ValueError: The controller cannot serve the model, there is already another one, or the strategy does not
            compress.
    """

    @refusing_unknown_options
    def __init__(self, controller: Controller, *, record: Where = True) -> None:
        super().__init__(record)
        if not isinstance(controller, Controller):
            raise TypeError(f"controller must be one of lowbit_strategy.control, got {controller!r}")
        self.controller = controller

    @property
    def driver(self) -> AdaptiveDriver | None:
        """The running controller, available once a fit is set up: current levels, state."""
        return self.control.driver if self.control is not None else None

    def add_part(self, control: ModelControl) -> None:
        control.adapt(self.controller)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.control is not None:
            self.control.take_effect()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.control is not None and self.driver is not None:
            done = batch_idx + 1  # a change of window must fall on the end of an old one and the start of a new one
            if done % trainer.accumulate_grad_batches == 0 and done % (self.driver.accumulation or 1) == 0:
                self.control.take_effect()


def _check_accumulation(controller: Controller, trainer: Any) -> None:
    """Raises:
    ValueError: The controller changes gradient accumulation, but the Trainer does not accumulate, or something else
        changes it.
    """
    name = type(controller).__name__
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"{name} changes gradient accumulation, which manual optimization does by itself: set"
            " automatic_optimization to True, or use a controller that changes no batch, such as Accordion"
        )
    kinds = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
    if "GradientAccumulationScheduler" in kinds:
        raise ValueError(
            f"{name} changes gradient accumulation, and so does GradientAccumulationScheduler: leave one of them out"
        )
