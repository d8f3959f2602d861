"""One model's controller, monitor, bounds and record on one rank. It knows no framework.

The session tells it when a backward pass begins and when a checkpoint has been loaded, the engine when a step begins
and ends. An adapter makes one when the model is attached, before a checkpoint is loaded, and gives it a controller, a
monitor, or both (`adapt`, `monitor`). A framework's own subclass knows the progress, receives metrics, and applies the
controller's accumulation and learning rate factor (`take_effect`, `scaled`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.adaptation.bounds_watch import BoundsWatch
from lowbit_strategy.adaptation.driver import AdaptiveDriver, level_metrics
from lowbit_strategy.adaptation.monitor_options import MonitorOptions
from lowbit_strategy.control.base import Controller, Progress
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.inform import inform, listed
from lowbit_strategy.methods._base.chooser import Chooser
from lowbit_strategy.model.handshake import handshake
from lowbit_strategy.telemetry.metric_names import metric_name, observation_metrics
from lowbit_strategy.telemetry.observe import Observation, Observer
from lowbit_strategy.telemetry.startup_report import startup_report

_RECORD = leaves.NeededBy("lowbit_strategy.report.writing:RunRecord", "its record (record)")
ProgressClock = Callable[[int], Progress]
Log = Callable[[dict[str, float], int], Any]

_log = logging.getLogger("lowbit_strategy")


class ModelControl(StepListener):
    """Controls one engine: its controller, monitor and record.

    Args:
        sync: The engine.

    Attributes:
        driver: The running controller, if there is one.
        observer: The running monitor, if there is one.
        loss: Loss of the last batch, if known: a number, or a tensor with one element.
        factor: The controller's current factor on learning rates.
        folder: The folder in which `begin` opens the record; None: there is no record.
        begun: Whether training has begun and no checkpoint has been loaded since.
    """

    def __init__(self, sync: GradientSync) -> None:
        self.sync = sync
        self.driver: AdaptiveDriver | None = None
        self.observer: Observer | None = None
        self.options: MonitorOptions | None = None
        self.loss: torch.Tensor | float | None = None
        self.factor = 1.0
        self.folder: Path | None = None
        self.begun = False
        self._given_clock: ProgressClock | None = None
        self._given_log: Log | None = None
        self._optimizer: Optimizer | None = None  # its learning rate is used if the clock has none
        self._record: Any = None
        self._bounds: BoundsWatch | None = None
        self._shown: Observation | None = None  # the last reported observation
        self._progress: Progress | None = None  # the observed step's
        self._reported = False  # whether the current levels were logged and recorded
        self._stepped = False  # whether a step has ended since training began
        if sync.in_parts:  # values are summed over all parts of the model
            handshake({"names of parameters": [*sync.specs]}, sync.ranks.everyone.group)
        sync.listeners.add(self, StepPhase.RECORD)

    @staticmethod
    def of(sync: GradientSync) -> ModelControl | None:
        """The control of `sync`, if it has one."""
        found = [each for each in sync.listeners[StepPhase.RECORD] if isinstance(each, ModelControl)]
        return found[0] if found else None

    # -- the training loop, overridden by a framework's control --------------------------------------------------------

    def clock(self, step: int) -> Progress:
        """The progress of a step; the same on all ranks. Without a learning rate, the session's optimizers have it."""
        return Progress(step=step)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics. Called on every rank."""

    @property
    def has_log(self) -> bool:
        """Whether anything receives what is logged."""
        return False

    # -- its parts ----------------------------------------------------------------------------------------------------

    def adapt(self, controller: Controller, clock: ProgressClock | None = None) -> AdaptiveDriver:
        """Let `controller` choose compressors from the next step on. `clock` replaces this object's.

        Raises:
            ValueError: There is a controller already, or this one does not support the model.
        """
        if self.driver is not None:
            raise ValueError(
                f"{type(self.driver.controller).__name__} chooses this model's compressors already, so"
                f" {type(controller).__name__} cannot as well: one model has one controller"
                " (Guard and Schedule wrap others)"
            )
        if isinstance(self.sync.compressor, Chooser):
            raise ValueError(
                f"{type(self.sync.compressor).__name__} chooses this model's compressor, so"
                f" {type(controller).__name__} cannot as well: give a compressor, or leave the controller out"
            )
        if clock is not None:
            self._given_clock = clock
        self.driver = AdaptiveDriver(controller, self.sync, self.progress)
        return self.driver

    def monitor(
        self,
        options: MonitorOptions,
        *,
        log: Log | None = None,
        folder: Path | None = None,
        optimizer: Optimizer | None = None,
    ) -> Observer:
        """Observe steps.

        Args:
            options: What to observe, and when.
            log: Receives metrics and their step, in place of this object's `log`.
            folder: The folder of the record.
            optimizer: Its learning rate is used if the clock has none.

        Raises:
            ValueError: There is a monitor already.
        """
        if self.observer is not None:
            raise ValueError("this model already has a monitor: give one, with the smaller every_n_steps")
        every = options.every_n_steps
        self._given_log, self.folder, self._optimizer = log, folder or self.folder, optimizer
        self.options, self.begun = options, False  # the record begins with the next backward pass
        self.observer = Observer(
            self.sync,
            lambda step: step % every < self.sync.steps_per_reduction,
            group_by=options.group_by,
        )
        if options.bounds is not None:
            self._bounds = BoundsWatch(options.bounds, self.sync)
        return self.observer

    # -- the steps ----------------------------------------------------------------------------------------------------

    def progress(self, step: int) -> Progress:
        """The progress of training when this step begins."""
        progress = (self._given_clock or self.clock)(step)
        if progress.learning_rate is not None:
            return progress
        if self._optimizer is not None:
            return replace(progress, learning_rate=self._optimizer.param_groups[0]["lr"])
        return replace(progress, learning_rate=self.sync.learning_rates.first_rate())

    def begin_pass(self, loss: torch.Tensor | None) -> None:
        """Called by the session when a backward pass begins, perhaps on this rank alone."""
        if loss is not None:
            self.loss = loss
        if not self.begun:
            self.begin()

    def checkpoint_loaded(self) -> None:
        """Its record begins again with the next backward pass. Called by the session."""
        self.begun = False

    def begin(self, **fields: Any) -> None:
        """Open the record in `folder` and write its first line, when training begins or continues.

        Args:
            fields: Additional fields for that line.

        Raises:
            ValueError: See `AdaptiveDriver.check`.
        """
        if self.driver is not None:
            self.driver.check()
        self.begun = True
        self._reported, self._stepped, self._shown = False, False, self._observation
        self._record = None
        self.take_effect()
        if self.folder is not None and self.sync.ranks.everyone.rank == 0:  # one per replica, if replicas come and go
            if leaves.is_present(_RECORD.target):
                self._record = leaves.load(_RECORD.target, "record")(self.folder)
                self._record.start(self, **fields)
            else:
                _log.warning("%s", _RECORD.warning)
        if self.observer is not None and self.folder is None and not self._is_logged and self.sync.ranks.logs:
            _log.warning(
                "the compression monitor has no logger and no folder for its record, so its measurements are lost:"
                " give the trainer a logger (tracker), or the monitor a folder, such as record='runs/1'"
            )

    @property
    def accumulation(self) -> int | None:
        """The current batches per optimizer step, which an adapter reads and sets in its framework; None: unknown."""
        return None

    @accumulation.setter
    def accumulation(self, batches: int) -> None:
        """Do nothing: the loop itself reads the driver's value."""

    def take_effect(self) -> None:
        """Between two optimizer steps, apply the controller's learning rate factor and number of batches."""
        if self.driver is None:
            return
        self.factor = self.driver.learning_rate_factor
        if self.driver.accumulation not in (None, self.accumulation):
            self.accumulation = self.driver.accumulation

    @contextlib.contextmanager
    def scaled(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Iterator[Any]:
        """A context in which learning rates have the controller's factor while the optimizer steps. An optimizer inside
        another one gets the factor only once.

        1. the factor is applied once gradients exist: immediately, or when the closure has computed them
        2. learning rates are restored when the step returns, even if it was skipped

        Args:
            optimizer: The optimizer that is about to step.
            closure: Its closure, if that computes gradients.

        Returns:
            The closure to pass instead of `closure`.
        """
        rates: list[float] = []

        def scale() -> None:
            if not rates and self.factor != 1.0:
                rates.extend(group["lr"] for group in optimizer.param_groups)
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * self.factor

        def compute() -> Any:
            assert closure is not None
            result = closure()
            scale()
            return result

        if closure is None:
            scale()
        try:
            yield None if closure is None else compute
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=False):
                group["lr"] = rate

    def begin_step(self) -> None:
        """Called by the engine."""
        self._stepped = True
        step = self.sync.step_index
        if self.observer is not None and self.observer.wants(step):
            self._progress = self.progress(step)

    def end_step(self, *, counted: bool) -> None:
        """Called by the engine."""
        if self.begun:
            self.sync.listeners.when_all_have_ended(self._report)

    def _report(self) -> None:
        """Write the last step's results to log and record: observation, decisions, changed members, warnings."""
        observation = self._observation
        if observation is not None and observation is not self._shown:
            self._shown = observation
            self._report_observation(observation)
        self._report_decisions()
        self._write_notes()

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Write a validation's metrics to the record."""
        if self._record is not None:
            self._record.write("validation", self.sync.step_index, metrics=dict(metrics))

    # -- reporting ----------------------------------------------------------------------------------------------------

    @property
    def _observation(self) -> Observation | None:
        return None if self.observer is None else self.observer.last

    @property
    def _is_logged(self) -> bool:
        return self._given_log is not None or self.has_log

    def _send(self, metrics: dict[str, float], step: int) -> None:
        (self._given_log or self.log)(metrics, step)

    def _report_observation(self, observation: Observation) -> None:
        if self._is_logged:
            self._send(observation_metrics(observation), observation.step)
        texts = [] if self._bounds is None else self._bounds.observe(observation)
        texts += self._not_finite(observation)
        if self._record is not None:
            self._record.observed(observation, self._progress or Progress(step=observation.step), self.loss, texts)

    def _not_finite(self, observation: Observation) -> list[str]:
        """A message for the record if gradients were infinite or not a number. Rank 0 warns."""
        names = observation.nonfinite
        if not names:
            return []
        text = f"gradients are not finite: {listed(names)}"
        if self.sync.ranks.logs:
            _log.warning("step %d: %s", observation.step, text)
        return [text]

    def _report_decisions(self) -> None:
        driver = self.driver
        if driver is None or not self._stepped:
            return
        if first := not self._reported:
            self._reported = True
            if driver.levels and self.sync.ranks.logs:  # the start-up report again
                name = type(driver.controller).__name__
                inform("training starts at the levels that %s chose:\n%s", name, startup_report(self.sync))
        if not self._is_logged and self._record is None:  # the loop itself reads the driver's lists
            return
        if not driver.events and not driver.warnings and not first:
            return
        events, driver.events = driver.events, []
        warnings, driver.warnings = driver.warnings, []
        step = events[-1].step if events else max(self.sync.step_index - 1, 0)
        if self._is_logged:
            accumulation = driver.accumulation or self.accumulation or 1
            metrics = {"accumulation": accumulation, "learning_rate_factor": driver.learning_rate_factor}
            self._send(
                level_metrics(driver) | {metric_name(what): float(value) for what, value in metrics.items()}, step
            )
        if self._record is not None:
            self._record.decided(driver, events, warnings, step)

    def _write_notes(self) -> None:
        while self._record is not None and self.sync.notes:
            kind, fields = self.sync.notes.popleft()
            self._record.write(kind, **fields)
