"""The progress of the user's loop, for the controllers of all models of an accelerator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator

from lowbit_strategy.control.base import Controller, Progress


class TrainingClock:
    """Progress for controllers: the same on all ranks, and saved with the residuals.

    It counts steps. The epoch is the first of these that is known: what the user has set (`epoch`), steps divided by
    `steps_per_epoch`, or the number of complete passes over the prepared data loader.

    Args:
        accelerator: Knows the data loader in use.
        num_steps: Number of planned optimizer steps, if the user gives it.
        steps_per_epoch: Optimizer steps per epoch, if the user gives it.

    Attributes:
        epoch: The epoch, set by the user; None: epochs are counted here.
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
        """Note the position in the data loader. Called before each backward pass."""
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
        ValueError: `controller` needs the epoch or the length of the run, which is unknown.
        """
        units, accelerator = set(_units(controller)), self._accelerator
        counts_epochs = not units.isdisjoint(("epoch", "epochs"))
        # Without even batches ranks may end an epoch at different steps.
        sees_epochs = accelerator.gradient_state.in_dataloader and accelerator.even_batches
        if counts_epochs and self.epoch is None and self.steps_per_epoch is None and not sees_epochs:
            raise ValueError(
                f"{type(controller).__name__} counts in epochs, and it is unknown when an epoch ends: training does"
                " not use a data loader that accelerator.prepare returned. Give the controller's interval or phases in"
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
    """Every `unit` in a controller, including those of its phases and inner controllers."""
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
