"""Controllers and the monitor at work on one accelerator: every model has its own, time is shared."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer

from lowbit_strategy.accelerate.plugin import LowBitPlugin
from lowbit_strategy.accelerate.training_clock import TrainingClock
from lowbit_strategy.control.base import Progress
from lowbit_strategy.hooks.attach import Attached
from lowbit_strategy.telemetry.adaptive_driver import AdaptiveDriver
from lowbit_strategy.telemetry.bounds import BoundsWatch
from lowbit_strategy.telemetry.custom_loop import (
    adapt,
    figures_to_log,
    level_fields,
    levels_to_log,
    metric_name,
    record_fields,
    start_fields,
)
from lowbit_strategy.telemetry.observe import Observation, Observer
from lowbit_strategy.telemetry.run_record import FILE_NAME, RunRecord


class AdaptiveBinding:
    """What a binding tells of its moments; nothing happens without a controller or a monitor.

    Args:
        plugin: Configuration.
        accelerator: Whose models are steered.

    Attributes:
        clock: Steps, epochs, learning rate.
        log: Takes figures and the step they are of, on every rank.
        folder: Of the record, None: nowhere.
    """

    def __init__(self, plugin: LowBitPlugin, accelerator: Accelerator) -> None:
        self.plugin = plugin
        self.accelerator = accelerator
        self.clock = TrainingClock(accelerator, plugin.num_steps, plugin.steps_per_epoch)
        self.log: Callable[[dict[str, float], int], Any] = accelerator.log
        self.folder = _folder(plugin.record, accelerator.logging_dir)
        self.accumulates = False  # the loop uses `accelerator.accumulate`
        self._controlled: WeakKeyDictionary[Attached, ModelControl] = WeakKeyDictionary()

    def attach(self, attached: Attached, number: int, *, alone: bool) -> None:
        """A model has been prepared; before a checkpoint is loaded.

        Args:
            attached: The model.
            number: Of the model.
            alone: No other model is in use.

        Raises:
            ValueError: The controller cannot serve it.
        """
        plugin = self.plugin
        if plugin.controller is None and plugin.monitor is None:
            return
        if plugin.controller is not None and plugin.controller.initial_accumulation is not None and not alone:
            raise ValueError(
                f"{type(plugin.controller).__name__} changes gradient accumulation, which all models of an Accelerator"
                " share: use it with one model, or give each model an Accelerator of its own"
            )
        self._controlled[attached] = ModelControl(self, attached, number)
        self._follow()

    def driver(self, attached: Attached) -> AdaptiveDriver | None:
        model = self._controlled.get(attached)
        return None if model is None else model.driver

    def before_backward(self, loss: Any, attachments: Iterable[Attached]) -> None:
        """Raises:
        ValueError: Training begins, and the controller needs what cannot be known or done here.
        """
        if not self._controlled:
            return
        self.clock.batch()
        for attached in attachments:
            model = self._controlled[attached]
            model.loss = loss.detach() if isinstance(loss, Tensor) else None
            if not model.begun:
                self._check()
                model.begin()

    def _check(self) -> None:
        controller = self.plugin.controller
        if controller is None:
            return
        self.clock.check(controller)
        if controller.initial_accumulation is not None and not self.accumulates:
            raise ValueError(
                f"{type(controller).__name__} changes gradient accumulation: put forward, backward and the optimizer's"
                " step into `with accelerator.accumulate(model):`"
            )

    def after_step(self, attached: Attached) -> None:
        """The optimizer of `attached` has stepped, and the step is over."""
        if (model := self._controlled.get(attached)) is not None:
            model.tell_decisions()
            self._follow()

    def after_load(self) -> None:
        """A checkpoint has been loaded."""
        for model in self._controlled.values():
            model.begun = False
        self._follow()

    def _follow(self) -> None:
        """Accumulate as many batches as the controller wants, from the next one on."""
        for model in self._controlled.values():
            wanted = None if model.driver is None else model.driver.accumulation
            if wanted is not None and wanted != self.accelerator.gradient_accumulation_steps:
                self.accelerator.gradient_accumulation_steps = wanted
                self.accelerator.step = 0  # windows are counted from here

    @contextlib.contextmanager
    def scaled(self, optimizer: Optimizer) -> Iterator[None]:
        """The controller's factor on learning rates, while the optimizer steps."""
        factor = 1.0
        for attached, model in self._controlled.items():
            if model.driver is not None and attached.owns(optimizer):
                factor = model.factor
        if factor == 1.0:
            yield
            return
        before = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate


class ModelControl:
    """One prepared model's controller, monitor and record."""

    def __init__(self, adaptive: AdaptiveBinding, attached: Attached, number: int) -> None:
        plugin = adaptive.plugin
        self.adaptive = adaptive
        self.begun = False
        self.sync = attached.sync
        self.number = number
        self.factor = 1.0  # on learning rates, in force
        self._attached = weakref.ref(attached)  # its sync's listeners must not keep the model alive
        self.loss: Tensor | None = None
        self.driver: AdaptiveDriver | None = None
        self._record: RunRecord | None = None
        self._told = False  # whether the trackers have what is in force
        self._bounds: BoundsWatch | None = None
        if plugin.controller is not None:
            self.driver = adapt(self.sync, plugin.controller, self._clock)
            self.sync.extra_state["clock"] = adaptive.clock
        if (monitor := plugin.monitor) is not None:
            every = monitor.every_n_steps
            self.observer = Observer(
                self.sync, lambda step: step % every == 0, group_by=monitor.group_by, on_observation=self._take
            )
            self._bounds = BoundsWatch(self.sync, monitor.bounds) if monitor.bounds is not None else None

    def _clock(self, step: int) -> Progress:
        attached, optimizers = self._attached(), self.adaptive.accelerator._optimizers
        own = next((each for each in optimizers if attached is not None and attached.owns(each)), None)
        return self.adaptive.clock.at(step, own)

    def begin(self) -> None:
        """Training begins, or goes on after a checkpoint has been loaded."""
        folder, monitor = self.adaptive.folder, self.adaptive.plugin.monitor
        self.begun, self._told = True, False
        self.factor = 1.0 if self.driver is None else self.driver.learning_rate_factor
        if folder is not None and self.sync.comm.rank == 0:
            self._record = RunRecord((folder if self.number == 0 else folder / f"model_{self.number}") / FILE_NAME)
            every = monitor.every_n_steps if monitor is not None else 0
            num_steps = self.adaptive.clock.num_steps
            self._record.write("start", self.sync.step_index, num_steps=num_steps, **start_fields(self.sync, every))

    def tell_decisions(self) -> None:
        """What the controller has decided since the last time, to the trackers and into the record."""
        driver = self.driver
        if driver is None:
            return
        self.factor = driver.learning_rate_factor
        if not driver.events and not driver.warnings and self._told:
            return
        self._told = True
        events, driver.events = driver.events, []
        warnings, driver.warnings = driver.warnings, []
        step = events[-1].step if events else max(driver.sync.step_index - 1, 0)
        accumulation = float(driver.accumulation or self.adaptive.accelerator.gradient_accumulation_steps)
        self._log(
            {
                **levels_to_log(driver),
                metric_name("accumulation"): accumulation,
                metric_name("learning_rate_factor"): driver.learning_rate_factor,
            },
            step,
        )
        if self._record is not None:
            for event in events:
                self._record.write("switch", event.step, epoch=event.epoch, **event.switch._asdict())
            for text in warnings:
                self._record.write("warning", step, text=text)
            self._record.write("levels", step, **level_fields(driver))

    def _take(self, observation: Observation) -> None:
        self._log(figures_to_log(observation), observation.step)
        texts = self._bounds.check(observation) if self._bounds is not None else []
        if self._record is not None:
            loss = None if self.loss is None else float(self.loss)
            self._record.write("observation", observation.step, loss=loss, **record_fields(observation))
            for text in texts:
                self._record.write("warning", observation.step, text=text)

    def _log(self, figures: dict[str, float], step: int) -> None:
        """A second model's figures have its number in their names."""
        prefix = metric_name("") if self.number == 0 else f"{metric_name('')}_{self.number}"
        self.adaptive.log({prefix + name.removeprefix(metric_name("")): value for name, value in figures.items()}, step)


def _folder(record: bool | str | Path, default: str | None) -> Path | None:
    if isinstance(record, bool):
        return Path(default) if record and default is not None else None
    return Path(record)
