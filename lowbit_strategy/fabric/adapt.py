"""Adds a controller or a monitor to a loop with Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit_strategy import custom_loop
from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.adaptation.monitor_options import MonitorOptions
from lowbit_strategy.control.base import Controller
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.options.configuration import takes_options_of
from lowbit_strategy.telemetry.observe import Observer


def engine_of(fabric: Any, model: nn.Module | None = None) -> GradientSync:
    """The engine of `model`, or of the only model that was set up.

    Raises:
        ValueError: The strategy does not belong to this package, or it is unclear which model is meant.
    """
    sessions = getattr(fabric.strategy, "sessions", None)
    if sessions is None:
        raise ValueError(
            f"the strategy is {type(fabric.strategy).__name__}, which compresses nothing: use"
            ' Fabric(strategy="loco_ddp"), "loco_fsdp" or another of lowbit_strategy'
        )
    found = [each for each in sessions if model is None or each.serves(model)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} models fit: call fabric.setup first, and pass the model if there are several")
    sync: GradientSync = found[0].sync
    return sync


def adapt(
    fabric: Any,
    controller: Controller,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    num_steps: int | None = None,
    steps_per_epoch: int | None = None,
) -> AdaptiveDriver:
    """Let a controller choose compressors. Call it after ``fabric.setup`` and before ``fabric.load``.

    Args:
        fabric: A Fabric with one of our strategies.
        controller: One of `lowbit_strategy.control`.
        model: The model, if several are set up.
        optimizer: The optimizer whose learning rate controllers see. None: the first one, in set-up order, that steps
            the model.
        num_steps: Number of planned optimizer steps, needed for phases given as fractions.
        steps_per_epoch: Optimizer steps per epoch, needed by controllers that count in epochs.

    Returns:
        The driver. The loop must apply its ``accumulation`` and ``learning_rate_factor``, if the controller decides on
        them.

    Raises:
        ValueError: The controller does not support this model, or there is one already.
    """
    clock = custom_loop.LoopClock(optimizer, num_steps, steps_per_epoch)
    return custom_loop.adapt(engine_of(fabric, model), controller, clock)


@takes_options_of(MonitorOptions)
def monitor(
    fabric: Any,
    *args: int | MonitorOptions,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    record: str | Path | None = None,
    **kwargs: Any,
) -> Observer:
    """Log the effects of compression, every n steps, through ``fabric.log_dict``. Call it after ``fabric.setup``.

    A controller's decisions (`adapt`) are logged in the same way.

    Args:
        fabric: A Fabric with one of our strategies.
        args: A `MonitorOptions`, or its arguments.
        kwargs: Keyword arguments of `MonitorOptions`.
        model: The model, if several are set up.
        optimizer: See `adapt`.
        record: A folder for the record that `lowbit report` draws.
    """
    control = custom_loop.control_of(engine_of(fabric, model))
    return control.monitor(
        MonitorOptions.of(*args, **kwargs),
        log=fabric.log_dict if fabric.loggers else None,
        folder=None if record is None else Path(record),
        optimizer=optimizer,
    )
