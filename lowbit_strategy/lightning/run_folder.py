"""Where the callbacks write: the run's folder, and the trainer's loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.telemetry.run_record import FILE_NAME, RunRecord

Where = bool | str | Path


def listen(trainer: Any, who: str, attach: Callable[[GradientSync], None]) -> None:
    """Call `attach` with the engine of the coming fit, before a checkpoint is loaded into it.

    Raises:
        ValueError: The trainer's strategy is none of ours.
    """
    listeners = getattr(trainer.strategy, "on_sync", None)
    if listeners is None:
        raise ValueError(
            f"{who} needs compressed gradient synchronisation, but the strategy is {type(trainer.strategy).__name__}:"
            ' use Trainer(strategy="loco_ddp"), "loco_fsdp" or another of lowbit_strategy'
        )
    listeners.append(attach)


def open_record(trainer: Any, where: Where) -> RunRecord | None:
    """The run's record on rank 0, None elsewhere. Call on all ranks: finding the logger's folder is collective."""
    if where is False or (where is True and not trainer.loggers):
        return None
    folder = trainer.log_dir if where is True else where
    if folder is None or not trainer.is_global_zero:
        return None
    return RunRecord(Path(folder) / FILE_NAME)


def log_metrics(trainer: Any, metrics: Mapping[str, float], step: int) -> None:
    """To all loggers at once, whatever their own interval is: the figures are those of this step."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=step)
