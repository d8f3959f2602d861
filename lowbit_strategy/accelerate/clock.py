"""The progress of the user's loop, for the controllers of all models of an accelerator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate import Accelerator

from lowbit_strategy.control.base import Progress
from lowbit_strategy.custom_loop import LoopClock


class TrainingClock(LoopClock):
    """Progress for controllers: the same on all ranks, and saved with the residuals. If the user gives neither `epoch`
    nor `steps_per_epoch`, an epoch is a complete pass over the prepared data loader.

    Args:
        accelerator: Knows the data loader in use.
        num_steps, steps_per_epoch: See `LoopClock`.
    """

    def __init__(self, accelerator: Accelerator, num_steps: int | None, steps_per_epoch: int | None) -> None:
        super().__init__(num_steps=num_steps, steps_per_epoch=steps_per_epoch)
        self._accelerator = accelerator
        self._passes = 0
        self._has_ended = False  # the last batch was the loader's last one
        self._iteration: int | None = None  # the loader's count of its passes
        self._was_inside = False  # whether a prepared loader was in use, in this process

    def batch(self) -> None:
        """Note the position in the data loader. Called before each backward pass."""
        state = self._accelerator.gradient_state
        if not state.in_dataloader:
            self._has_ended = self._has_ended or self._was_inside  # a loader reads ahead, to its end
            return
        iteration = int(getattr(state.active_dataloader, "iteration", 0))
        has_ended = bool(state.end_of_dataloader)
        if self._has_ended and (not has_ended or iteration != self._iteration):
            self._passes += 1
        self._has_ended, self._iteration, self._was_inside = has_ended, iteration, True

    def __call__(self, step: int) -> Progress:
        progress = super().__call__(step)
        if progress.epoch is None and self._was_inside and self._accelerator.even_batches:  # otherwise ranks may differ
            return replace(progress, epoch=self._passes)
        return progress

    # -- saving -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._passes, "over": self._has_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._passes, self._has_ended, self._iteration = state["passes"], state["over"], None
