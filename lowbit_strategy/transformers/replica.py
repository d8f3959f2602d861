"""A Trainer as one of the replicas that come and go: its steps, its schedule, its checkpoints."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from transformers import Trainer

from lowbit_strategy.accelerate.binding import Binding, binding_of, wrap_method


def join_in(trainer: Trainer) -> None:
    """Once, before training: it follows the others' steps, and only the lowest replica writes checkpoints."""
    trainer.args.ignore_data_skip = True  # the position in the data is the replicas', and is saved with them

    def save_if_lowest(save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if (binding := binding_of(trainer.accelerator)) is None or binding.writes_checkpoints:
            save(*args, **kwargs)

    wrap_method(trainer, "_save_checkpoint", save_if_lowest)


def follow(trainer: Trainer, binding: Binding) -> None:
    """Training begins, and the others are about to be met."""
    if binding.replica is not None:
        binding.replica.on_healed = functools.partial(_catch_up, trainer)


def _catch_up(trainer: Trainer, steps: int) -> None:
    """The Trainer counts from the others' step, and so does its schedule of the learning rate."""
    missing = steps - trainer.state.global_step
    if missing <= 0:
        return
    trainer.state.global_step = trainer._globalstep_last_logged = steps
    schedule: Any = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # inside of Accelerate's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer has not stepped before the schedule
        for _ in range(missing):
            schedule.step()
