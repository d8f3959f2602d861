"""Runs a Hugging Face Trainer as one of several replicas that join and leave."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lowbit_strategy.accelerate.binding import binding_of, wrap_method
from lowbit_strategy.elastic.learning_rates import advance_schedule


def adapt(trainer: Any) -> None:
    """Divide samples among replicas; the lowest replica writes checkpoints, and one that joins catches up."""
    trainer.args.ignore_data_skip = True  # replicas have and save their own position in the data
    trainer._save_checkpoint = functools.partial(_save_if_lowest, trainer, trainer._save_checkpoint)
    wrap_method(trainer, "train", functools.partial(_train, trainer))


def _train(trainer: Any, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if (binding := binding_of(trainer.accelerator)) is not None and binding.replica is not None:
        binding.replica.on_healed = functools.partial(_catch_up, trainer)
    return train(*args, **kwargs)


def _save_if_lowest(trainer: Any, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if (binding := binding_of(trainer.accelerator)) is None or binding.writes_checkpoints:
        save(*args, **kwargs)


def _catch_up(trainer: Any, steps: int) -> None:
    """Let the Trainer and its learning-rate schedule count from the others' step."""
    missing = steps - trainer.state.global_step
    if missing <= 0:
        return
    trainer.state.global_step = trainer._globalstep_last_logged = steps
    schedule: Any = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # inside Accelerate's scheduler
    advance_schedule(schedule, missing)
