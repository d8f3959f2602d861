"""Everything that a training loop without a framework calls. `compress` is enough; by hand it is, in this order:

1. `prepare` before the model is wrapped, then `attach_ddp` or `attach_fsdp` after it, which return a `Session`
2. `adapt` for a controller, `monitor` for observation and a record; both take ``session.sync``
3. ``session.load`` of a checkpoint, if there is one
4. ``session.begin_step`` before every backward pass, ``session.end_step`` after every optimizer step
5. ``with session.save(path) as stamp:`` around the writing of each checkpoint, ``session.close`` at the end
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowbit_strategy.attach.attach import attach_ddp, attach_fsdp
from lowbit_strategy.attach.compress import compress
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.session import CHECKPOINT_KEY, Session
from lowbit_strategy.attach.strategy_options import SyncOptions
from lowbit_strategy.control.base import Controller, GroupBy, Progress
from lowbit_strategy.control.guard import Bounds
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.telemetry.adaptive_driver import AdaptiveDriver
from lowbit_strategy.telemetry.model_control import ModelControl, MonitorOptions
from lowbit_strategy.telemetry.observe import Observer

__all__ = [
    "CHECKPOINT_KEY",
    "AdaptiveDriver",
    "GradientSync",
    "LoopClock",
    "MonitorOptions",
    "Observer",
    "Session",
    "SyncOptions",
    "adapt",
    "attach_ddp",
    "attach_fsdp",
    "compress",
    "control_of",
    "monitor",
    "prepare",
]


@dataclass(eq=False)
class LoopClock:
    """The progress of a training loop whose steps no framework counts.

    Args:
        optimizer: Gives the learning rate.
        num_steps: Optimizer steps planned; for phases in fractions.
        steps_per_epoch: Optimizer steps per epoch; epochs are counted by it. None: set `epoch` yourself.
    """

    optimizer: torch.optim.Optimizer | None = None
    num_steps: int | None = None
    steps_per_epoch: int | None = None
    epoch: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in ("num_steps", "steps_per_epoch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive or None, got {value!r}")

    def __call__(self, step: int) -> Progress:
        return Progress(
            step=step,
            epoch=step // self.steps_per_epoch if self.steps_per_epoch is not None else self.epoch,
            num_steps=self.num_steps,
            steps_per_epoch=self.steps_per_epoch,
            learning_rate=self.optimizer.param_groups[0]["lr"] if self.optimizer is not None else None,
        )


def control_of(sync: GradientSync) -> ModelControl:
    """The control of this engine, made if it has none yet. Set its ``loss`` before each step to have it recorded."""
    return ModelControl.of(sync) or ModelControl(sync)


def adapt(sync: GradientSync, controller: Controller, clock: Callable[[int], Progress] | None = None) -> AdaptiveDriver:
    """Let a controller choose compressors from the next step on; call it before a checkpoint is loaded.

    What a controller decides beside compressors is in the driver's ``accumulation`` and ``learning_rate_factor``, for
    the loop to apply.

    Args:
        sync: The engine, ``session.sync``.
        controller: One of `lowbit_strategy.control`.
        clock: Gives the progress of each step, such as a `LoopClock`; without one only steps are counted.

    Raises:
        ValueError: The controller cannot serve this model, or there is one already.
    """
    control = control_of(sync)
    if clock is not None:
        control.clock = clock
    return control.adapt(controller)


def monitor(
    sync: GradientSync,
    log: Callable[[dict[str, float], int], Any] | None,
    *,
    every_n_steps: int = 50,
    group_by: GroupBy = "kind",
    bounds: Bounds | None = None,
    record: str | Path | None = None,
) -> Observer:
    """Call ``log(metrics, step)`` on every rank after each observed step, and whenever a controller decides.

    Args:
        sync: As for `adapt`.
        log: Such as ``fabric.log_dict`` or ``accelerator.log``; None: for the record alone.
        every_n_steps: Optimizer steps from one observation to the next; nothing is measured between.
        group_by: See `lowbit_strategy.control.group_of`.
        bounds: Warn when a group leaves them.
        record: A folder where rank 0 keeps the record that `lowbit report` draws.

    Raises:
        TypeError: `bounds` is not a `Bounds`.
        ValueError: `every_n_steps` is not positive, `group_by` is unknown, or there is a monitor already.
    """
    control = control_of(sync)
    observer = control.monitor(MonitorOptions(every_n_steps=every_n_steps, group_by=group_by, bounds=bounds))
    control.log = log
    control.folder = None if record is None else Path(record)
    control.warn_without_audience(log=log is not None)
    return observer
