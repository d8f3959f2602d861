"""AdaptiveCompression: a controller in a Lightning run. Independent of the Lightning namespace."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lowbit_strategy.control.base import Controller, Progress
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepPhase
from lowbit_strategy.lightning.run_folder import Where, listen, log_metrics, open_record
from lowbit_strategy.telemetry.adaptive_driver import AdaptiveDriver
from lowbit_strategy.telemetry.custom_loop import metric_name
from lowbit_strategy.telemetry.run_record import RunRecord

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object


class AdaptiveCompressionMixin(_Base):
    """See `lowbit_strategy.lightning.AdaptiveCompression`."""

    def __init__(self, controller: Controller, *, record: Where = True) -> None:
        super().__init__()
        if not isinstance(controller, Controller):
            raise TypeError(f"controller must be one of lowbit_strategy.control, got {controller!r}")
        self.controller = controller
        self.record = record
        self.driver: AdaptiveDriver | None = None
        self._record: RunRecord | None = None
        self._told = False  # whether the record has what is in force
        self._factor = 1.0  # of the learning rate, in force
        self._rates: list[tuple[dict[str, Any], float]] = []  # to be put back after the optimizer's step
        self._num_steps: int | None = None
        self._steps_per_epoch: int | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._trainer = trainer
            self.driver = AdaptiveDriver(self.controller, clock=self._clock)
            listen(trainer, "AdaptiveCompression", self._attach)

    def _attach(self, sync: GradientSync) -> None:
        assert self.driver is not None
        self.driver.attach(sync)
        sync.subscribe(_AfterStep(self), StepPhase.RECORD)

    def _clock(self, step: int) -> Progress:
        trainer = self._trainer
        optimizers = trainer.optimizers
        return Progress(
            step=step,
            epoch=trainer.current_epoch,
            num_steps=self._num_steps,
            steps_per_epoch=self._steps_per_epoch,
            learning_rate=optimizers[0].param_groups[0]["lr"] if optimizers else None,
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert self.driver is not None
        total, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
        self._num_steps = int(total) if 0 < total < math.inf else None
        per_step = trainer.accumulate_grad_batches
        self._steps_per_epoch = math.ceil(batches / per_step) if 0 < batches < math.inf else None
        self._record = open_record(trainer, self.record)
        self._told = False
        self._accumulate(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._factor != 1.0:
            for group in optimizer.param_groups:
                self._rates.append((group, group["lr"]))
                group["lr"] *= self._factor

    def restore_learning_rates(self) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        driver = self.driver
        assert driver is not None
        if driver.accumulation is not None and driver.accumulation != trainer.accumulate_grad_batches:
            done = batch_idx + 1  # a change of window must fall on the end of an old one and the start of a new one
            if done % trainer.accumulate_grad_batches == 0 and done % driver.accumulation == 0:
                self._accumulate(trainer)
        if not driver.events and not driver.warnings and self._told:
            return
        self._told = True
        events, driver.events = driver.events, []
        warnings, driver.warnings = driver.warnings, []
        step = events[-1].step if events else driver.sync.step_index - 1
        log_metrics(trainer, self._metrics(trainer), step)
        if self._record is not None:
            for event in events:
                self._record.write("switch", event.step, epoch=event.epoch, **event.switch._asdict())
            for text in warnings:
                self._record.write("warning", step, text=text)
            self._record.write("levels", step, **self._levels())

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._accumulate(trainer)

    def _accumulate(self, trainer: Any) -> None:
        """Bring accumulation and learning rate to what the controller wants; at the boundary of a window."""
        driver = self.driver
        if driver is not None and driver.accumulation is not None:
            trainer.accumulate_grad_batches = driver.accumulation
            self._factor = driver.learning_rate_factor

    def _shares(self) -> dict[str, float]:
        """Share of all elements by level."""
        assert self.driver is not None
        specs, numels = self.driver.sync.specs, dict.fromkeys(self.driver.labels, 0)
        for name, level in self.driver.levels.items():
            numels[self.driver.labels[level]] += specs[name].numel
        total = sum(numels.values()) or 1
        return {label: numel / total for label, numel in numels.items()}

    def _metrics(self, trainer: Any) -> dict[str, float]:
        metrics = {metric_name("share", f"level_{at}"): share for at, share in enumerate(self._shares().values())}
        return metrics | {
            metric_name("accumulation"): float(trainer.accumulate_grad_batches),
            metric_name("learning_rate_factor"): self._factor,
        }

    def _levels(self) -> dict[str, Any]:
        """What is in force, for the record."""
        assert self.driver is not None
        return {
            "labels": list(self.driver.labels),
            "shares": self._shares(),
            "parameters": dict(self.driver.levels),
            "accumulation": self.driver.accumulation,
        }


class _AfterStep:
    """Right after the optimizer, before schedulers look at the learning rate."""

    def __init__(self, callback: AdaptiveCompressionMixin) -> None:
        self._callback = callback

    def begin_step(self) -> None:
        return None

    def end_step(self, *, counted: bool) -> None:
        self._callback.restore_learning_rates()
