"""The progress of a Trainer's run."""

from __future__ import annotations

import math
from typing import Any

from lowbit_strategy.control.base import Progress


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
