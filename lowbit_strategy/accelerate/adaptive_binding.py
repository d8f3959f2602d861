"""Controllers and monitors under an accelerator: its moments for the `ModelControl` of each prepared model, and the
progress of a loop that is the user's own, which all of them share.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch.optim import Optimizer

from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.attach.session import Session
from lowbit_strategy.control.base import Controller, Progress
from lowbit_strategy.telemetry.metric_names import for_model


class TrainingClock:
    """Progress for controllers; the same on all ranks, saved with the residuals.

    Steps are counted. The epoch is, in this order: what the user has set (`epoch`), steps divided by `steps_per_epoch`,
    or how often the prepared data loader has been gone through to its end.

    Args:
        accelerator: Knows the data loader that is being gone through.
        num_steps: Optimizer steps planned, if the user gives them.
        steps_per_epoch: Optimizer steps per epoch, likewise.

    Attributes:
        epoch: Set by the user, who counts epochs; None: count them here.
    """

    def __init__(self, accelerator: Accelerator, num_steps: int | None, steps_per_epoch: int | None) -> None:
        self._accelerator = accelerator
        self.num_steps = num_steps
        self.steps_per_epoch = steps_per_epoch
        self.epoch: int | None = None
        self._passes = 0
        self._has_ended = False  # the last batch was the loader's last one
        self._iteration: int | None = None  # the loader's own count of its passes
        self._was_inside = False  # a prepared loader, in this process

    def batch(self) -> None:
        """Note the position in the data loader; call before each backward pass."""
        state = self._accelerator.gradient_state
        if not state.in_dataloader:
            self._has_ended = self._has_ended or self._was_inside  # it has been read to its end ahead of time
            return
        iteration = int(getattr(state.active_dataloader, "iteration", 0))
        has_ended = bool(state.end_of_dataloader)
        if self._has_ended and (not has_ended or iteration != self._iteration):
            self._passes += 1
        self._has_ended, self._iteration, self._was_inside = has_ended, iteration, True

    def __call__(self, step: int) -> Progress:
        counted = self._passes if self.steps_per_epoch is None else step // self.steps_per_epoch
        epoch = counted if self.epoch is None else self.epoch
        return Progress(step=step, epoch=epoch, num_steps=self.num_steps, steps_per_epoch=self.steps_per_epoch)

    def check(self, controller: Controller) -> None:
        """Raises:
        ValueError: `controller` needs an epoch or a length of the run that is unknown.
        """
        units, accelerator = set(_units(controller)), self._accelerator
        counts_epochs = not units.isdisjoint(("epoch", "epochs"))
        # Without even batches ranks may end an epoch at different steps.
        sees_epochs = accelerator.gradient_state.in_dataloader and accelerator.even_batches
        if counts_epochs and self.epoch is None and self.steps_per_epoch is None and not sees_epochs:
            raise ValueError(
                f"{type(controller).__name__} counts in epochs, and it is unknown when one ends: training does not go"
                " through a data loader that accelerator.prepare returned. Give the controller's interval or phases in"
                ' steps (unit="steps"), or give steps_per_epoch, or set accelerator.lowbit.epoch in the loop'
            )
        if "fraction" in units and self.num_steps is None:
            raise ValueError(
                f"{type(controller).__name__} has a phase in fractions of the run, whose length is unknown: give"
                " num_steps, or the phase in steps"
            )

    # -- saving -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._passes, "over": self._has_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._passes, self._has_ended, self._iteration = state["passes"], state["over"], None


def _units(value: object) -> Iterator[str]:
    """Every `unit` in a controller, those of its phases and inner controllers included."""
    if isinstance(value, (tuple, list)):
        for entry in value:
            yield from _units(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            entry = getattr(value, field.name)
            if field.name == "unit":
                yield str(entry)
            else:
                yield from _units(entry)


class AdaptiveBinding:
    """Called by the binding at an accelerator's moments; does nothing without a controller or a monitor.

    Args:
        plugin: The `LowBitPlugin`.
        accelerator: Whose models are controlled.
        numbers: Numbers of all models that have been prepared.

    Attributes:
        clock: Steps and epochs.
        log: Takes metrics and the step that they are of, on every rank.
        has_log: Gives whether there is anybody who takes them.
        folder: Folder of the record, None: nowhere.
        accumulates: The loop uses ``accelerator.accumulate``.
    """

    def __init__(self, plugin: Any, accelerator: Accelerator, numbers: Mapping[Session, int]) -> None:
        self.plugin = plugin
        self.accelerator = accelerator
        self.clock = TrainingClock(accelerator, plugin.num_steps, plugin.steps_per_epoch)
        self.log: Callable[[dict[str, float], int], Any] = accelerator.log
        self.has_log: Callable[[], bool] = lambda: bool(accelerator.trackers)
        record = accelerator.logging_dir if plugin.record is True else plugin.record
        self.folder = None if record is None or record is False else Path(record)
        self.accumulates = False
        self._numbers = numbers
        self._controls: WeakKeyDictionary[Session, ModelControl] = WeakKeyDictionary()

    def attach(self, session: Session, *, alone: bool) -> None:
        """A model has been prepared, and no checkpoint has been loaded into it. `alone`: no other one is in use.

        Raises:
            ValueError: The controller cannot serve it.
        """
        plugin = self.plugin
        if plugin.controller is None and plugin.monitor is None:
            return
        if plugin.controller is not None and plugin.controller.initial_accumulation is not None and not alone:
            raise ValueError(
                f"{type(plugin.controller).__name__} changes gradient accumulation, which all models of an Accelerator"
                " share: use it with one model, or give each model its own Accelerator"
            )
        number = self._numbers[session]
        control = ModelControl(
            session.sync, self.clock, lambda metrics, step: self.log(for_model(metrics, number), step)
        )
        control.has_log = lambda: self.has_log()
        control.accumulation = lambda: self.accelerator.gradient_accumulation_steps
        if plugin.controller is not None:
            control.adapt(plugin.controller)
            session.sync.save_with("clock", self.clock)
        if plugin.monitor is not None:
            control.monitor(plugin.monitor)
        self._controls[session] = control
        self.take_effect()

    def driver(self, session: Session) -> AdaptiveDriver | None:
        control = self._controls.get(session)
        return None if control is None else control.driver

    def before_backward(self, sessions: Iterable[Session]) -> None:
        """Raises:
        ValueError: Training begins, and the controller needs what cannot be known or done here.
        """
        if not self._controls:
            return
        self.clock.batch()
        for session in sessions:
            if not self._controls[session].begun:
                self._begin(self._controls[session], self._numbers[session])

    def _begin(self, control: ModelControl, number: int) -> None:
        if (controller := self.plugin.controller) is not None:
            self.clock.check(controller)
            if controller.initial_accumulation is not None and not self.accumulates:
                raise ValueError(
                    f"{type(controller).__name__} changes gradient accumulation: put forward, backward and the"
                    " optimizer's step into `with accelerator.accumulate(model):`"
                )
        if self.folder is not None:
            control.folder = self.folder if number == 0 else self.folder / f"model_{number}"

    def take_effect(self) -> None:
        """Accumulates the number of batches that the controller has set, from the next step on."""
        for control in self._controls.values():
            wanted = control.take_effect()
            if wanted is not None and wanted != self.accelerator.gradient_accumulation_steps:
                self.accelerator.gradient_accumulation_steps = wanted
                self.accelerator.step = 0  # windows are counted from here

    @contextlib.contextmanager
    def scaled(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Iterator[Any]:
        """See `ModelControl.scaled`."""
        with contextlib.ExitStack() as stack:
            for session, control in self._controls.items():
                if session.owns(optimizer):
                    closure = stack.enter_context(control.scaled(optimizer, closure))
            yield closure
