"""Both callbacks. They pass a Trainer's events to one `ModelControl`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.adaptation.monitor_options import MonitorOptions
from lowbit_strategy.control.base import Controller
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.options.configuration import takes_options_of
from lowbit_strategy.options.conversion import refusing_unknown_options
from lowbit_strategy.telemetry.observe import Observation

from .lightning_control import LightningControl
from .stock import Callback

Where = bool | str | Path


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
        call_with_engine = getattr(trainer.strategy, "call_with_engine", None)
        if call_with_engine is None:
            raise ValueError(
                f"{type(self).__name__} needs compressed gradient synchronization, but the strategy is"
                f' {type(trainer.strategy).__name__}: use Trainer(strategy="loco_ddp"), "loco_fsdp" or another of'
                " lowbit_strategy"
            )
        self._trainer = trainer
        call_with_engine(self._attach)

    def _attach(self, sync: GradientSync) -> None:
        """Attach to the engine of the coming fit, before a checkpoint is loaded."""
        self.control = ModelControl.of(sync) or LightningControl(sync, self._trainer)
        self.add_part(self.control)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.control is not None and not self.control.begun:  # made by the other callback
            self.control.begin()


class CompressionMonitor(ControlCallback):
    """Shows the effects of compression on gradients, in the trainer's loggers and progress bar.

    Every n-th step it measures, over all ranks, in total and by group: relative error and cosine similarity of what was
    sent against gradient plus residual, residual norm, bits per element, bytes on the wire, and milliseconds in codecs
    and in waiting for bytes. Between those steps it does nothing. `lowbit report` draws its record.

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
        ValueError: The controller does not support the model, there is a controller already, or the strategy does not
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
            done = batch_idx + 1  # windows change only where an old one ends and a new one starts
            if done % trainer.accumulate_grad_batches == 0 and done % (self.driver.accumulation or 1) == 0:
                self.control.take_effect()
