"""Controllers and observation in a training loop of one's own: for Fabric, Accelerate, or plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lowbit_strategy.control.base import Controller, Progress
from lowbit_strategy.control.groups import GroupBy, check_group_by
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepPhase
from lowbit_strategy.telemetry.adaptive_driver import AdaptiveDriver
from lowbit_strategy.telemetry.observe import Observation, Observer
from lowbit_strategy.telemetry.run_record import FILE_NAME, RunRecord

_PER_GROUP = ("relative_error", "cosine", "residual_norm", "bits_per_element", "wire_nbytes")


class LoopClock:
    """The time in a loop that nobody else keeps.

    Args:
        optimizer: Gives the learning rate.
        num_steps: Optimizer steps planned; for phases in fractions.
        steps_per_epoch: Optimizer steps of an epoch; epochs are counted by it. None: set `epoch` yourself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        num_steps: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        for name, value in (("num_steps", num_steps), ("steps_per_epoch", steps_per_epoch)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive or None, got {value!r}")
        self.optimizer = optimizer
        self.num_steps = num_steps
        self.steps_per_epoch = steps_per_epoch
        self.epoch = 0

    def __call__(self, step: int) -> Progress:
        return Progress(
            step=step,
            epoch=step // self.steps_per_epoch if self.steps_per_epoch is not None else self.epoch,
            num_steps=self.num_steps,
            steps_per_epoch=self.steps_per_epoch,
            learning_rate=self.optimizer.param_groups[0]["lr"] if self.optimizer is not None else None,
        )


def adapt(sync: GradientSync, controller: Controller, clock: Callable[[int], Progress] | None = None) -> AdaptiveDriver:
    """Let a controller choose compressors from the next step on; before a checkpoint is loaded.

    What a controller wants beside compressors is in the driver's ``accumulation`` and ``learning_rate_factor``, for
    the loop to apply.

    Args:
        sync: The engine: ``attached.sync`` of what the framework's adapter has attached.
        controller: One of `lowbit_strategy.control`.
        clock: Tells the time at each step, such as a `LoopClock`; without one only steps are counted.

    Raises:
        ValueError: The controller cannot serve this model.
    """
    driver = AdaptiveDriver(controller, clock=clock)
    driver.attach(sync)
    return driver


def monitor(
    sync: GradientSync,
    log: Callable[[dict[str, float], int], Any],
    *,
    every_n_steps: int = 50,
    group_by: GroupBy = "kind",
    record: str | Path | None = None,
) -> Observer:
    """Call ``log(figures, step)`` on every rank after each observed step.

    Args:
        sync: As for `adapt`.
        log: Such as ``fabric.log_dict`` or ``accelerator.log``.
        every_n_steps: Optimizer steps from one observation to the next; nothing happens between.
        group_by: See `lowbit_strategy.control.group_of`.
        record: A folder where rank 0 keeps the record that `lowbit report` draws.

    Raises:
        ValueError: `every_n_steps` is not positive, or `group_by` is unknown.
    """
    check_monitor(every_n_steps, group_by)
    rank = sync.comm.rank
    writer = RunRecord(Path(record) / FILE_NAME) if record is not None and rank == 0 else None
    if writer is not None:
        sync.subscribe(_Opening(sync, writer, start_fields(sync, every_n_steps)), StepPhase.RECORD)

    def take(observation: Observation) -> None:
        log(figures_to_log(observation), observation.step)
        if writer is not None:
            writer.write("observation", observation.step, **record_fields(observation))

    return Observer(sync, lambda step: step % every_n_steps == 0, group_by=group_by, on_observation=take)


def check_monitor(every_n_steps: int, group_by: GroupBy) -> None:
    """Raises:
    ValueError: `every_n_steps` is not positive, or `group_by` is unknown.
    """
    if not isinstance(every_n_steps, int) or every_n_steps < 1:
        raise ValueError(f"every_n_steps must be a positive integer, got {every_n_steps!r}")
    check_group_by(group_by)


class _Opening:
    """The first line of a record, when the first step begins: by then a checkpoint has been loaded."""

    def __init__(self, sync: GradientSync, writer: RunRecord, fields: dict[str, Any]) -> None:
        self._sync, self._writer, self._fields = sync, writer, fields

    def begin_step(self) -> None:
        if self._fields:
            self._writer.write("start", self._sync.step_index, **self._fields)
            self._fields = {}

    def end_step(self, *, counted: bool) -> None:
        return None


def start_fields(sync: GradientSync, every_n_steps: int) -> dict[str, Any]:
    """What a record says of a run at its start."""
    return {
        "world_size": sync.comm.world_size,
        "layout": "reduce-scatter" if sync.scatter else "all-reduce",
        "every_n_steps": every_n_steps,
    }


def record_fields(observation: Observation) -> dict[str, Any]:
    return {key: value for key, value in asdict(observation).items() if key != "step"}


def shares(driver: AdaptiveDriver) -> dict[str, float]:
    """Share of all elements by level, as a controller has it in force."""
    specs, numels = driver.sync.specs, dict.fromkeys(driver.labels, 0)
    for name, level in driver.levels.items():
        numels[driver.labels[level]] += specs[name].numel
    total = sum(numels.values()) or 1
    return {label: numel / total for label, numel in numels.items()}


def level_fields(driver: AdaptiveDriver) -> dict[str, Any]:
    """What is in force, for the record."""
    return {
        "labels": list(driver.labels),
        "shares": shares(driver),
        "parameters": dict(driver.levels),
        "accumulation": driver.accumulation,
    }


def levels_to_log(driver: AdaptiveDriver) -> dict[str, float]:
    """The same as metrics."""
    return {metric_name("share", f"level_{at}"): share for at, share in enumerate(shares(driver).values())}


def figures_to_log(observation: Observation) -> dict[str, float]:
    """An observation as metrics: totals, then each group that is compressed."""
    total = observation.total
    metrics = {
        metric_name("relative_error"): total.relative_error,
        metric_name("cosine"): total.cosine,
        metric_name("residual_norm"): total.residual_norm,
        metric_name("bits_per_element"): total.bits_per_element,
        metric_name("wire_nbytes"): observation.sent_nbytes,
        metric_name("codec_ms"): observation.codec_ms,
        metric_name("comm_ms"): observation.comm_ms,
    }
    for group, figures in observation.groups.items():
        if figures.compressed:
            metrics |= {metric_name(what, group): getattr(figures, what) for what in _PER_GROUP}
    return metrics


def metric_name(what: str, group: str = "") -> str:
    """``lowbit/relative_error/blocks.N.weight``: loggers take no asterisks."""
    return "/".join(filter(None, ("lowbit", what, group.replace("*", "N"))))
