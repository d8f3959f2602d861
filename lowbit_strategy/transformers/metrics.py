"""Metrics in a Trainer's log: totals everywhere, those of groups to trackers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer

from lowbit_strategy.telemetry.metric_format import is_of_group

_CONSOLES = (PrinterCallback, ProgressCallback)  # they print a line with everything that is logged


def log_metrics(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Log `metrics` as the Trainer logs its own; a large model has dozens of groups, which no console should print."""
    trainer.log({name: value for name, value in metrics.items() if not is_of_group(name)})
    groups: dict[str, Any] = {name: value for name, value in metrics.items() if is_of_group(name)}
    if not groups:
        return
    for callback in trainer.callback_handler.callbacks:
        if not isinstance(callback, _CONSOLES):
            callback.on_log(trainer.args, trainer.state, trainer.control, logs=dict(groups), model=trainer.model)
